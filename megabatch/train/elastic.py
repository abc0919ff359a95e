"""An elastic run on one worker: how the trainer changes worlds, and goes on.

The trainer calls `begin` once, `has_changed` now and then after a step, and `meet_again` when another worker is lost.
Each ends with a new world, and with every worker in the state of the one that was furthest ahead. A step that was not
finished everywhere is made again by those who are there, to the same bits.

The main rank may be the one that is lost. Then the new main rank takes over the run folder: it appends to
`metrics.jsonl` the rows that the lost one did not write, and writes a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from megabatch.comm.failures import is_lost_contact
from megabatch.comm.messages import broadcast
from megabatch.comm.shape import GridShape, default_shape, parse_grid
from megabatch.config import Config
from megabatch.errors import LaunchError, MegabatchError
from megabatch.files import append_line
from megabatch.machine import host_name
from megabatch.train.components import Components
from megabatch.train.progress import Progress
from megabatch.train.request import Elastic
from megabatch.train.run_dir import digest_of
from megabatch.train.run_writer import RunWriter
from megabatch.train.state import RunState
from megabatch.workers.local import REPLACES_VARIABLE, STARTED_VARIABLE
from megabatch.workers.membership import NEWCOMER, Membership, Roster, TooFewWorkersError
from megabatch.workers.pack import pack, unpack
from megabatch.workers.stop import StopRequest
from megabatch.workers.world import World

ASK_SECONDS = 0.5
"""A worker that comes takes part after at most so long, and the step that is going on."""

MEMBERSHIP_FILE = "membership.jsonl"

_TRIES = 20


class Participant(Protocol):
    """What an elastic run needs of its trainer."""

    config: Config
    folder: Path
    components: Components
    state: RunState
    writer: RunWriter
    progress: Progress
    resume: bool
    world: World
    grid: GridShape
    workers: tuple[str, ...]  # names of those who take part; nobody before the first world
    is_concluding: bool

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, saved: dict[str, Any]) -> None: ...
    def enter_world(self, world: World, grid: GridShape, names: tuple[str, ...], hosts: list[str]) -> None: ...


class LeftRunError(MegabatchError):
    """This worker was asked to leave, and has."""


class ElasticRun:
    """Brings a trainer and a membership together.

    name: of this worker. grid: asked for by the user, used while it fits the workers.
    """

    def __init__(self, elastic: Elastic, token: bytes, grid: str | None = None) -> None:
        self.name = f"{host_name()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._elastic, self._token, self._grid = elastic, token, grid
        self._last_ask = 0.0

    def begin(self, trainer: Participant, stack: ExitStack) -> bool:
        """Meet the others; whether all begin together. Otherwise this worker has the state of a run that goes on."""
        config, elastic = trainer.config, self._elastic
        labels = hashlib.sha256(trainer.components.train_source.labels.tobytes()).hexdigest()
        versions = f"megabatch {version('megabatch')}, torch {torch.__version__}, {torch.get_num_threads()} threads"
        self._membership = Membership(
            self.name,
            elastic.lighthouse,
            self._token,
            digest_of(config, labels, f"{versions}, {elastic.min_workers} to {elastic.max_workers} workers"),
            # One that takes the place of a dead worker begins with whoever is there: not all dead ones are replaced.
            founders=1 if REPLACES_VARIABLE in os.environ else elastic.founders,
            min_workers=elastic.min_workers,
            max_workers=elastic.max_workers,
            wait_seconds=config.comm.wait_seconds,
            hang_seconds=config.comm.hang_seconds,
            way=elastic.way,
        )
        self._stack = stack
        stack.callback(self._membership.close)
        roster = self._move(trainer, None)
        if roster.is_beginning:
            # All workers may have died, and others have taken their places: the run goes on from its checkpoint.
            in_place_of_others = REPLACES_VARIABLE in os.environ and (trainer.folder / "config.toml").is_file()
            trainer.resume = broadcast(trainer.resume or in_place_of_others, bool)
        return roster.is_beginning

    def wants_to_ask(self, world: World) -> bool:
        """Whether it is time to ask who takes part now; the main rank's clock decides for all."""
        return world.is_main and time.monotonic() - self._last_ask >= ASK_SECONDS

    def leaves(self, world: World, stop: StopRequest) -> bool:
        """SIGTERM to one worker takes that worker away; to the last one, it stops the run."""
        return world.size > 1 and stop.signal_name == "SIGTERM"

    def has_changed(self, trainer: Participant) -> bool:
        """Ask who takes part; when others do than before, move to their world. Every rank must call it."""
        roster = self._ask(trainer)
        self._last_ask = time.monotonic()
        if set(roster.names) == set(trainer.workers):
            return False
        self._leave_world(trainer)
        self._move(trainer, roster)
        return True

    def meet_again(self, trainer: Participant) -> None:
        """Another worker is lost: go on with those who are there."""
        self._leave_world(trainer)
        self._move(trainer, None)

    def _leave_world(self, trainer: Participant) -> None:
        trainer.components.disconnect()
        self._membership.disconnect()

    def _ask(self, trainer: Participant) -> Roster:
        """Who takes part now; when too few do for too long, a checkpoint is written, and the run ends."""
        try:
            return self._membership.ask(trainer.state.how_far if trainer.workers else NEWCOMER)
        except TooFewWorkersError:
            if trainer.workers:  # not a newcomer, which has nothing to save
                trainer.writer.save_last(self._stack)
            raise

    def _move(self, trainer: Participant, roster: Roster | None) -> Roster:
        """Go on in the world of a roster, or of whoever is there; ends when all are connected and in one state."""
        began = time.monotonic()
        for _ in range(_TRIES):
            try:
                if roster is None:
                    with _ending_with_the_run(trainer):
                        roster = self._ask(trainer)
                self._membership.connect(roster)
                before = self._enter(trainer, roster)
            except Exception as error:
                if not is_lost_contact(error):
                    raise
                self._leave_world(trainer)
                roster = None
            else:
                if not roster.is_beginning and trainer.world.is_main:
                    self._lead(trainer, roster, before, time.monotonic() - began)
                elif not trainer.world.is_main:
                    trainer.writer.hand_over()
                self._last_ask = time.monotonic()
                return roster
        raise LaunchError(f"workers met {_TRIES} times and could not connect; look at the network between them")

    def _enter(self, trainer: Participant, roster: Roster) -> tuple[str, ...]:
        """Connect, and take the state of the worker that is furthest ahead; returns who took part in its last step."""
        world = roster.world_of(self.name)
        shape = parse_grid(self._grid) if self._grid else None
        if shape is None or shape.world_size != world.size:
            shape, _ = default_shape(roster.hosts)
        trainer.components.connect(world, shape, self._membership.hang_seconds)
        self._membership.share(
            roster, lambda: pack(trainer.state_dict()), lambda content: trainer.load_state_dict(unpack(content))
        )
        before = trainer.workers
        trainer.enter_world(world, shape, roster.names, roster.hosts)
        return before

    def _lead(self, trainer: Participant, roster: Roster, before: tuple[str, ...], seconds: float) -> None:
        """As the main rank: take the run folder over; say and write down who came and who went."""
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
            "grid": trainer.grid.text,
        }
        append_line(trainer.folder / MEMBERSHIP_FILE, json.dumps(entry))
        told = [f"lost {', '.join(lost)}"] * bool(lost) + [f"joined by {', '.join(joined)}"] * bool(joined)
        what = "; ".join(told) or "met again"
        trainer.progress.say(
            f"workers        {len(roster.seats)} after step {trainer.state.clock.steps}: {what} ({seconds:.2f} s)"
        )


@contextmanager
def _ending_with_the_run(trainer: Participant) -> Iterator[None]:
    """While the block lasts, end this process when others have finished the run: nobody is left to meet.

    It may be a worker that comes late, or one that hung while the others went on. A summary that is older than the
    launcher speaks of an earlier end of the run.
    """
    started, met = float(os.environ.get(STARTED_VARIABLE, "inf")), threading.Event()

    def end_if_finished() -> None:
        with suppress(OSError):
            if (trainer.folder / "summary.json").stat().st_mtime > started:
                print("the others have finished the run without this worker", flush=True)
                os._exit(0)

    def watch() -> None:
        while not met.wait(ASK_SECONDS):
            end_if_finished()

    if trainer.is_concluding:  # then it is this worker's own end, too
        yield
        return
    end_if_finished()
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        met.set()
