"""The state of a run besides the weights: the only place that writes it, and how it goes into a checkpoint and back.

The main rank reads and writes the file; its bytes are broadcast, so the other hosts need no shared disk to resume.
Random numbers need no state of their own: the sample order, the augmentation and the seed of every ghost batch are pure
functions of the stored seed and the clock. Inside a branch the checkpoint also holds the trunk as the branch left it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megabatch.comm.messages import broadcast_bytes
from megabatch.errors import CheckpointError, TrainingError
from megabatch.schedule.clock import Clock
from megabatch.train.branch import TrainingState
from megabatch.train.checkpoint import check_fits, decode, link_best, newest_whole, refusing_damage
from megabatch.train.components import Components
from megabatch.train.evaluate import Evaluation
from megabatch.train.phases import Ending
from megabatch.workers.world import on_main_rank

_MAX_MEMBERS = 1_000_000  # of an ensemble
_PLACE = ("made", "stop_wanted", "outcome")


@dataclass(frozen=True)
class Member:
    """What a branch has left behind: one member of an ensemble."""

    member: int  # its number, from 1 on
    from_epoch: float  # of the trunk, where the branch began
    epochs: float  # its length
    top1: float
    top5: float
    val_loss: float
    file: str  # its weights in the run folder; empty on other ranks than the main one


@dataclass(frozen=True)
class MadeStep:
    """A step that counts and is still to be evaluated, logged and saved."""

    before: Clock
    scheduled: dict[str, float]
    columns: dict[str, Any]
    applied: bool  # False when its gradient was not finite and the weights were left alone
    step_seconds: float
    is_last: bool
    stop_wanted: bool


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended, and how good its model is, None after a stop: what is left to do is to conclude it."""

    ending: Ending
    result: Evaluation | None


@dataclass
class RunState:
    """What a run carries from step to step besides the weights. Its methods alone change it."""

    clock: Clock  # of the phase that is going on; its steps count over all phases
    phase: int = 0  # its number
    trunk_clock: Clock | None = None  # where the trunk waits while a branch goes on
    seen_samples: int = 0  # of all phases
    members: list[Member] = field(default_factory=list)  # the branches that are done
    trunk_top1: float | None = None  # of its last evaluation
    skipped_steps: int = 0  # gradients so far that were not finite
    skipped_in_a_row: int = 0
    best_top1: float = -1.0
    best_step: int = 0
    training_seconds: float = 0.0  # in steps alone
    wall_seconds: float = 0.0  # in the whole loop: steps, evaluations, checkpoints
    length_since_step: int = 0  # the step after which the run was given the length it has now
    trunk: TrainingState | None = None  # what the branch that is going on returns to
    made: MadeStep | None = None  # the newest step, until it is finished
    stop_wanted: bool = False  # it was the last one before a stop
    outcome: RunEnd | None = None  # when nothing is left to do but to conclude

    @property
    def epoch(self) -> float:
        """How far the weights have come: a branch counts on from where it left the trunk."""
        return self.past_epochs + self.clock.epoch

    @property
    def past_epochs(self) -> float:
        """The epochs that the weights had behind them at epoch 0 of the present clock."""
        return self.trunk_clock.epoch if self.trunk_clock else 0.0

    @property
    def how_far(self) -> int:
        """How far the run is, as one number: steps, whether the last one is finished, members, whether it is over."""
        finished_members = (self.clock.steps * 2 + (self.made is None)) * _MAX_MEMBERS + len(self.members)
        return finished_members * 2 + (self.outcome is not None)

    def take_length(self, total_samples: int) -> None:
        """The run shall end after so many images, whatever it was to be before; its schedules are stretched."""
        if total_samples != self.clock.total_samples:
            self.clock = replace(self.clock, total_samples=total_samples)
            self.length_since_step = self.clock.steps

    def enter_phase(self, number: int) -> bool:
        """Go on with this phase; whether it is a new one."""
        is_new, self.phase = number != self.phase, number
        return is_new

    def has_left(self, phase_number: int) -> bool:
        """Whether the run is in another phase by now: then what is under way in this one ends.

        A rank of an elastic run may be behind when ranks meet. It takes the state of one that is further, which may
        have begun a later phase, and goes on there.
        """
        return self.phase != phase_number

    def leave_trunk(self, branch_clock: Clock, trunk: TrainingState) -> None:
        """A branch begins; the trunk waits where it is, and as it is."""
        self.trunk_clock, self.clock, self.trunk = self.clock, branch_clock, trunk

    def return_to_trunk(self, member: Member) -> None:
        """A branch is over and has left this member behind; steps are counted on."""
        assert self.trunk_clock is not None
        self.members = [*(one for one in self.members if one.member != member.member), member]
        self.clock, self.trunk_clock = replace(self.trunk_clock, steps=self.clock.steps), None
        self.skipped_in_a_row = 0

    def forget_trunk(self) -> None:
        """The trunk is trained on; nothing has to return to it."""
        self.trunk = None

    def count_step(self, made: MadeStep, num_samples: int) -> None:
        """A step is made, and is still to be finished."""
        self.made = made
        self.stop_wanted = made.stop_wanted
        self.clock = self.clock.after(num_samples)
        self.seen_samples += num_samples
        self.training_seconds += made.step_seconds
        self.skipped_in_a_row = 0 if made.applied else self.skipped_in_a_row + 1
        self.skipped_steps += not made.applied

    def finish_step(self) -> None:
        """The newest step is evaluated, logged and saved, as far as it is to be."""
        self.made = None

    def count_evaluation(self, top1: float) -> bool:
        """Weights were evaluated after a step; whether they are the best so far."""
        is_best = (
            top1 > self.best_top1 or self.best_step == self.clock.steps
        )  # said again when a step is finished again
        if is_best:
            self.best_top1, self.best_step = top1, self.clock.steps
        return is_best

    def note_trunk_top1(self, top1: float) -> None:
        """The trunk was evaluated."""
        self.trunk_top1 = top1

    def end(self, outcome: RunEnd) -> None:
        """The run has ended so, and its model is judged."""
        self.outcome = outcome

    def note_wall_seconds(self, seconds: float) -> None:
        """So much time has passed in the loop, over all parts of the run."""
        self.wall_seconds = seconds

    def refuse_to_diverge(self, max_skipped_steps: int, lr: float) -> None:
        """Stop a run whose gradients have not been finite for too many steps in a row.

        Raises:
            TrainingError: where that was, and what to do.
        """
        if self.skipped_in_a_row > max_skipped_steps:
            raise TrainingError(
                f"{self.skipped_in_a_row} steps in a row had gradients that are not finite (the last at step "
                f"{self.clock.steps}, epoch {self.epoch:.3f}, lr {lr:g}; at most {max_skipped_steps} are skipped); "
                "lower optimizer.lr or lengthen its warm-up, then --resume"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: plain values, without the trunk and without where in a step or at its end it is."""
        plain = asdict(replace(self, trunk=None, made=None, outcome=None))
        return {name: value for name, value in plain.items() if name not in ("trunk", *_PLACE)}

    def place_dict(self) -> dict[str, Any]:
        """Where the run is between two steps or at its end, for a worker that goes on from there; plain values."""
        outcome = self.outcome and [self.outcome.ending.value, self.outcome.result and asdict(self.outcome.result)]
        return {"made": self.made and asdict(self.made), "stop_wanted": self.stop_wanted, "outcome": outcome}

    def load_state_dict(
        self, state: dict[str, Any], trunk: TrainingState | None = None, place: dict[str, Any] | None = None
    ) -> None:
        """Go on from `state`; place: as `place_dict` gives it, None for between two steps."""
        made, outcome = (place[name] if place else None for name in ("made", "outcome"))
        trunk_clock = state["trunk_clock"]
        typed = {
            "clock": Clock(**state["clock"]),
            "trunk_clock": Clock(**trunk_clock) if trunk_clock else None,
            "members": [Member(**member) for member in state["members"]],
            "trunk": trunk,
            "made": MadeStep(**{**made, "before": Clock(**made["before"])}) if made else None,
            "stop_wanted": bool(place and place["stop_wanted"]),
            "outcome": RunEnd(Ending(outcome[0]), outcome[1] and Evaluation(**outcome[1])) if outcome else None,
        }
        for name in (
            one.name for one in fields(self)
        ):  # a missing part is a KeyError; what else is there is left alone
            setattr(self, name, typed[name] if name in typed else state[name])


def whole_state(components: Components, state: RunState) -> dict[str, Any]:
    """Everything that the run goes on from after a finished step; tensors are the live ones."""
    return components.trained.state_dict() | {
        "seed": components.config.train.seed,
        "world_size": components.world.size,
        "run": state.state_dict(),
        "trunk": state.trunk,
        "noise": components.noise_scale.state_dict() if components.noise_scale else None,
        "adaptive": components.adaptive.state_dict() if components.adaptive else None,
    }


def take_state(components: Components, state: RunState, saved: dict[str, Any]) -> None:
    """Go on from what `whole_state` gave, here or elsewhere; "place" is there when another worker gave it."""
    state.load_state_dict(saved["run"], saved["trunk"], saved.get("place"))
    components.trained.load_state_dict(saved)
    if components.noise_scale and saved["noise"]:
        components.noise_scale.load_state_dict(saved["noise"])
    if components.adaptive and saved["adaptive"]:
        components.adaptive.load_state_dict(saved["adaptive"])


def restore(components: Components, state: RunState, folder: Path, say: Callable[[str], None]) -> int:
    """Continue from the newest whole checkpoint, if any; returns the length of the metrics file that belongs to it."""
    saved = _broadcast_state(components, folder, say)
    if saved is None:
        say(f"no checkpoint in '{folder}' yet: starting from the beginning")
        return 0
    with refusing_damage(str(folder)):
        check_fits(saved, components.network.state_dict(), f"run folder '{folder}'")
        num_images, given = saved["run"]["clock"]["samples_per_epoch"], state.clock.samples_per_epoch
        if num_images != given:
            raise CheckpointError(
                f"run folder '{folder}' was trained on {num_images} images, the data given has {given}; "
                "resume with the same data, or choose another --output"
            )
        planned = state.clock.total_samples
        take_state(components, state, saved)
        if components.config.collapse is None:  # the length of a run with branches does not change
            state.take_length(planned)
        if components.world.is_main and state.best_step:
            link_best(folder / "checkpoints", state.best_step)
        then = f" (then on {saved['world_size']} workers)" if saved["world_size"] != components.world.size else ""
        say(f"resuming after step {state.clock.steps}, epoch {state.epoch:.3f}{then}")
        return int(saved["metrics_bytes"])


def _broadcast_state(components: Components, folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    data = on_main_rank(components.world.is_main, lambda: newest_whole(folder / "checkpoints", say))
    data = broadcast_bytes(data)
    return decode(data, str(folder)) if data else None
