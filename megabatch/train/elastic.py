"""An elastic run on one worker: how the trainer changes worlds, and goes on.

The trainer calls `begin` once, `have_changed` after every step, and does `together` what another worker may be lost in.
Each may end with a new world, and with every worker in the state of the one that was furthest ahead. A step that was
not finished everywhere is made again by those who are there, to the same bits.

The main rank may be the one that is lost. Then the new main rank takes over the run folder: it appends to
`metrics.jsonl` the rows that the lost one did not write, and writes a checkpoint.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from megabatch.comm.failures import is_lost_contact
from megabatch.comm.messages import gather
from megabatch.comm.shape import default_shape, parse_grid
from megabatch.errors import DisagreementError, LaunchError, MegabatchError, first_line
from megabatch.files import append_line
from megabatch.machine import host_name
from megabatch.report.run import CONFIG_FILE, MEMBERSHIP_FILE, SUMMARY_FILE
from megabatch.train.agreement import agreement_of
from megabatch.train.components import Components
from megabatch.train.evaluate import Evaluator
from megabatch.train.progress import Progress
from megabatch.train.request import Elastic
from megabatch.train.run_dir import status_of
from megabatch.train.run_writer import RunWriter
from megabatch.train.state import RunState, take_state, whole_state
from megabatch.train.step import Votes
from megabatch.workers.local import LEFT_EXIT_CODE, REPLACES_VARIABLE, STARTED_VARIABLE
from megabatch.workers.membership import Membership, OtherRunError, TooFewWorkersError
from megabatch.workers.roster import NEWCOMER, Roster, Seat, agreement_text, part_of
from megabatch.workers.state_bytes import pack, unpack
from megabatch.workers.stop import StopRequest

T = TypeVar("T")

ASK_SECONDS = 0.5
"""A worker that comes takes part after at most so long, and the step that is going on."""

_TRIES = 20
_FAILURES = 8  # of the same workers at the same place


class Participant(Protocol):
    """What an elastic run needs of its trainer."""

    folder: Path
    components: Components
    state: RunState
    writer: RunWriter
    stop: StopRequest
    evaluator: Evaluator
    progress: Progress


class LeftRunError(MegabatchError):
    """This worker was asked to leave, and has."""


class Start(Enum):
    """How a worker begins."""

    NEW = "new"  # with the others, a run
    RESUMED = "resumed"  # with the others, from the newest checkpoint
    JOINED = "joined"  # among others whose run goes on, and it has their state already


class FixedWorkers:
    """The same workers from beginning to end: the calls of `ElasticRun`, and nothing to do in them."""

    def __init__(self, rank: int) -> None:
        self.name = str(rank)

    def begin(self, trainer: Participant, stack: ExitStack, *, resume: bool) -> Start:
        return Start.RESUMED if resume else Start.NEW

    def together(self, action: Callable[[], T]) -> T:
        return action()

    def votes(self, stop: StopRequest) -> Votes:
        return Votes(stop_wanted=stop.wanted)

    def have_changed(self, ask_wanted: bool) -> bool:
        return False

    def concluding(self) -> AbstractContextManager[None]:
        return nullcontext()


class ElasticRun:
    """Brings a trainer and a membership together.

    name: of this worker. grid: asked for by the user, used while it fits the workers.
    """

    def __init__(self, elastic: Elastic, token: bytes, grid: str | None = None) -> None:
        self.name = f"{host_name()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._elastic, self._token, self._grid = elastic, token, grid
        self._names: tuple[str, ...] = ()  # of those who take part; nobody before the first world
        self._last_ask = 0.0
        self._failures = 0
        self._failed_at: tuple[tuple[str, ...], int] = (), NEWCOMER
        self._is_concluding = self._is_leaving = False

    def begin(self, trainer: Participant, stack: ExitStack, *, resume: bool) -> Start:
        """Meet the others, and find out whether a run begins or goes on."""
        self._trainer, self._components, self._stack = trainer, trainer.components, stack
        config, elastic = self._components.config, self._elastic
        agreement = agreement_of(self._components, self._grid, elastic.min_workers, elastic.max_workers)
        self._membership = Membership(
            self.name,
            elastic.lighthouse,
            self._token,
            agreement_text(agreement),
            # One that takes the place of a dead worker begins with whoever is there: not all dead ones are replaced.
            founders=1 if REPLACES_VARIABLE in os.environ else elastic.founders,
            min_workers=elastic.min_workers,
            max_workers=elastic.max_workers,
            wait_seconds=config.comm.wait_seconds,
            hang_seconds=config.comm.hang_seconds,
            way=elastic.way,
        )
        stack.callback(self._membership.close)
        if not self._move(None).is_beginning:
            return Start.JOINED
        # All workers may have died, and others have taken their places: the run goes on from its checkpoint, also where
        # one who merely came along meets them as the first.
        in_place_of_others = REPLACES_VARIABLE in os.environ and (trainer.folder / CONFIG_FILE).is_file()
        return Start.RESUMED if any(gather(resume or in_place_of_others, bool)) else Start.NEW

    def together(self, action: Callable[[], T]) -> T:
        """Do what needs every worker; when another is lost on the way, again, with those who are left."""
        while True:
            try:
                return action()
            except Exception as error:
                if not is_lost_contact(error):
                    raise
                self._refuse_to_go_round(error)
                self._leave_world()
                self._move(None)

    def _refuse_to_go_round(self, error: Exception) -> None:
        """Raise LaunchError when these workers will not do together what they try to do."""
        place = self._names, self._trainer.state.how_far
        self._failures = self._failures + 1 if place == self._failed_at else 1
        self._failed_at = place
        if isinstance(error, DisagreementError) or self._failures >= _FAILURES:
            raise LaunchError(
                f"{len(self._names)} workers met after step {self._trainer.state.clock.steps}, and {self._failures} "
                f"times the same step failed ({first_line(error)}); look at the logs of {', '.join(self._names[:4])}, "
                "and raise comm.hang_seconds if one is merely slow"
            ) from None

    def _wants_to_ask(self) -> bool:
        """Whether it is time to ask who takes part now; the main rank's clock decides for all."""
        return self._components.world.is_main and time.monotonic() - self._last_ask >= ASK_SECONDS

    def votes(self, stop: StopRequest) -> Votes:
        """What this worker wants after the step that begins; ask once for each.

        SIGTERM takes a worker away; the last one, and all that would leave after the same step, stop the run.
        """
        self._is_leaving = self._components.world.size > 1 and stop.signal_name in self._elastic.leave_on
        return Votes(stop.wanted and not self._is_leaving, self._is_leaving, self._wants_to_ask())

    def have_changed(self, ask_wanted: bool) -> bool:
        """After a step, on every worker: whether others take part now than in it; then all have moved to their world.

        Raises:
            LeftRunError: this worker was asked to leave.
        """
        if self._is_leaving:
            self._trainer.writer.save()
            raise LeftRunError(f"left the run after step {self._trainer.state.clock.steps}; the others go on")
        if not ask_wanted:
            return False
        roster = self._ask()
        self._last_ask = time.monotonic()
        if set(roster.names) == set(self._names):
            return False
        self._leave_world()
        self._move(roster)
        return True

    @contextmanager
    def concluding(self) -> Iterator[None]:
        """The run ends in this block. Nobody leaves it early: another may have to write what a lost worker did not."""
        self._is_concluding = True
        yield
        if self._components.world.size > 1:
            torch.distributed.barrier()

    def _leave_world(self) -> None:
        self._components.disconnect()
        self._membership.disconnect()

    def _ask(self) -> Roster:
        """Who takes part now; when too few do for too long, a checkpoint is written, and the run ends."""
        try:
            return self._membership.ask(self._trainer.state.how_far if self._names else NEWCOMER)
        except OtherRunError as error:
            if REPLACES_VARIABLE in os.environ:  # the code has changed since the run began: no reason to end the run
                raise LeftRunError(f"takes nobody's place: {error}") from None
            raise
        except TooFewWorkersError:
            if self._names:  # not a newcomer, which has nothing to save
                self._trainer.writer.save_last(self._stack)
            if self._trainer.stop.wanted:  # all were asked to go, some a step earlier, or the lighthouse was
                raise LeftRunError("was asked to stop, and nobody is left; start again with --resume") from None
            raise

    def _move(self, roster: Roster | None) -> Roster:
        """Go on in the world of a roster, or of whoever is there; ends when all are connected and in one state."""
        began = time.monotonic()
        for _ in range(_TRIES):
            try:
                if roster is None:
                    with self._ending_with_the_run():
                        roster = self._ask()
                self._membership.connect(roster)
                before = self._enter(roster)
            except Exception as error:
                if not is_lost_contact(error) or isinstance(error, DisagreementError):
                    raise
                self._leave_world()
                roster = None
            else:
                if not self._components.world.is_main:
                    self._trainer.writer.hand_over()
                elif not roster.is_beginning:
                    self._lead(roster, before, time.monotonic() - began)
                self._last_ask = time.monotonic()
                return roster
        raise LaunchError(f"workers met {_TRIES} times and could not connect; look at the network between them")

    def _enter(self, roster: Roster) -> tuple[str, ...]:
        """Connect, and take the state of the worker that is furthest ahead; returns who took part in its last step."""
        world = roster.world_of(self.name)
        shape = parse_grid(self._grid) if self._grid else None
        if shape is None or shape.world_size != world.size:
            shape, _ = default_shape(roster.hosts)
        self._components.connect(world, shape, self._membership.hang_seconds)
        self._membership.share(
            roster, lambda: pack(self._state_dict()), lambda data: self._load_state_dict(unpack(data))
        )
        before, self._names = self._names, roster.names
        self._trainer.evaluator.weights_changed()  # a step that is finished again is evaluated by all or by none
        return before

    def _state_dict(self) -> dict[str, Any]:
        """Everything that another worker needs to go on from here."""
        state = self._trainer.state
        of_run = {"place": state.place_dict(), "rows": self._trainer.writer.rows, "workers": list(self._names)}
        return whole_state(self._components, state) | of_run

    def _load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from where another worker is."""
        take_state(self._components, self._trainer.state, saved)
        self._trainer.writer.replace_rows(saved["rows"])
        self._names = tuple(saved["workers"])

    def _lead(self, roster: Roster, before: tuple[str, ...], seconds: float) -> None:
        """As the main rank: take the run folder over; say and write down who came and who went."""
        trainer = self._trainer
        trainer.writer.take_over(self._stack)
        lost = [name for name in before if name not in roster.names]
        joined = [name for name in roster.names if name not in before]
        entry: dict[str, Any] = {
            "time": time.time(),
            "step": trainer.state.clock.steps,
            "workers": len(roster.seats),
            "lost": lost,
            "joined": joined,
            "seconds": seconds,
            "grid": self._components.shape.text,
            "joined_with": [_equipment(seat) for seat in roster.seats if seat.name in joined],
        }
        append_line(trainer.folder / MEMBERSHIP_FILE, json.dumps(entry))
        told = [f"lost {', '.join(lost)}"] * bool(lost) + [f"joined by {', '.join(joined)}"] * bool(joined)
        what = "; ".join(told) or "met again"
        trainer.progress.say(
            f"workers        {len(roster.seats)} after step {trainer.state.clock.steps}: {what} ({seconds:.2f} s)"
        )

    @contextmanager
    def _ending_with_the_run(self) -> Iterator[None]:
        """While the block lasts, end this process when others have finished or stopped the run: nobody is left to meet.

        It may be a worker that comes late, or one that hung while the others went on. A summary that is older than the
        launcher speaks of an earlier end of the run.
        """
        started, met = float(os.environ.get(STARTED_VARIABLE, "inf")), threading.Event()

        def end_if_finished() -> None:
            with suppress(OSError):
                folder = self._trainer.folder
                if (folder / SUMMARY_FILE).stat().st_mtime > started:
                    status = status_of(folder)
                    print(f"the others have {status} the run without this worker", flush=True)
                    os._exit(0 if status == "finished" else LEFT_EXIT_CODE)

        def watch() -> None:
            while not met.wait(ASK_SECONDS):
                end_if_finished()

        if self._is_concluding:  # then it is this worker's own end, too
            yield
            return
        end_if_finished()
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            met.set()


def _equipment(seat: Seat) -> dict[str, str]:
    """What is known of a worker that has joined; as for all others, or it would have been refused."""
    parts = {name: part_of(seat.agreement, name) for name in ("processor", "torch", "threads")}
    return {"name": seat.name, "host": seat.host, **parts}
