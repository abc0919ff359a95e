"""The state of a run besides the weights: the only place that writes it, and how it goes into a checkpoint and back.

The main rank reads and writes the file; its bytes are broadcast, so the other hosts need no shared disk to resume.
Random numbers need no state of their own: the sample order, the augmentation and the seed of every ghost batch are pure
functions of the stored seed and the clock. Inside a branch the checkpoint also holds the trunk as the branch left it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.errors import CheckpointError, MegabatchError
from megabatch.schedule.batch import Step
from megabatch.schedule.clock import Clock
from megabatch.train.branch import TrainingState, load_training_state, training_state
from megabatch.train.checkpoint import check_fits, decode, link_best, newest_whole, save_checkpoint
from megabatch.train.components import Components
from megabatch.train.world import raise_everywhere

__all__ = ["RunState", "restore", "save"]


@dataclass
class RunState:
    """What a run carries from step to step besides the weights. Its methods alone change it."""

    clock: Clock  # of the phase that is going on; its steps count over all phases
    phase: int = 0  # its number
    trunk_clock: Clock | None = None  # where the trunk waits while a branch goes on
    seen_samples: int = 0  # of all phases
    members: list[dict[str, Any]] = field(default_factory=list)  # the branches that are done
    trunk_top1: float | None = None  # of its last evaluation
    skipped_steps: int = 0  # gradients so far that were not finite
    skipped_in_a_row: int = 0
    best_top1: float = -1.0
    best_step: int = 0
    training_seconds: float = 0.0  # in steps alone
    wall_seconds: float = 0.0  # in the whole loop: steps, evaluations, checkpoints

    @property
    def epoch(self) -> float:
        """How far the weights have come: a branch counts on from where it left the trunk."""
        return self.past_epochs + self.clock.epoch

    @property
    def past_epochs(self) -> float:
        """The epochs that the weights had behind them at epoch 0 of the present clock."""
        return self.trunk_clock.epoch if self.trunk_clock else 0.0

    def enter_phase(self, number: int) -> bool:
        """Go on with this phase; whether it is a new one."""
        is_new, self.phase = number != self.phase, number
        return is_new

    def leave_trunk(self, branch_clock: Clock) -> None:
        """A branch begins; the trunk waits where it is."""
        self.trunk_clock, self.clock = self.clock, branch_clock

    def return_to_trunk(self, member: dict[str, Any]) -> None:
        """A branch is over and has left this member behind; steps are counted on."""
        assert self.trunk_clock is not None
        self.members = [*(one for one in self.members if one["member"] != member["member"]), member]
        self.clock, self.trunk_clock = replace(self.trunk_clock, steps=self.clock.steps), None
        self.skipped_in_a_row = 0

    def count_step(self, step: Step, seconds: float, applied: bool) -> None:
        """A step is made; `applied` is false when its gradient was not finite and the weights were left alone."""
        self.clock = self.clock.after(step.num_samples)
        self.seen_samples += step.num_samples
        self.training_seconds += seconds
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        self.skipped_steps += not applied

    def count_evaluation(self, top1: float) -> bool:
        """Weights were evaluated after a step; whether they are the best so far."""
        is_best = top1 > self.best_top1
        if is_best:
            self.best_top1, self.best_step = top1, self.clock.steps
        return is_best

    def note_trunk_top1(self, top1: float) -> None:
        """The trunk was evaluated."""
        self.trunk_top1 = top1

    def note_wall_seconds(self, seconds: float) -> None:
        """So much time has passed in the loop, over all parts of the run."""
        self.wall_seconds = seconds

    def state_dict(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        trunk = state["trunk_clock"]
        clocks = {"clock": Clock(**state["clock"]), "trunk_clock": Clock(**trunk) if trunk else None}
        for name, value in {**state, **clocks}.items():
            setattr(self, name, value)


def save(
    parts: Components, run: RunState, trunk: TrainingState | None, folder: Path, metrics_bytes: int, is_best: bool
) -> None:
    """Write a checkpoint; every rank must call it, the main one writes. `trunk` is what a branch returns to."""
    state = training_state(parts.network, parts.optimizer, parts.statistics, parts.scaler)
    if not parts.world.is_main:
        return
    state |= {
        "seed": parts.config.train.seed,
        "world_size": parts.world.size,
        "metrics_bytes": metrics_bytes,
        "run": run.state_dict(),
        "trunk": trunk,
        "noise": parts.noise.state_dict() if parts.noise else None,
        "adaptive": parts.adaptive.state_dict() if parts.adaptive else None,
    }
    settings = parts.config.checkpoint
    save_checkpoint(folder / "checkpoints", state, run.clock.steps, settings.keep, best=is_best)


def restore(
    parts: Components, run: RunState, folder: Path, say: Callable[[str], None]
) -> tuple[int, TrainingState | None]:
    """Continue from the newest whole checkpoint, if any.

    Returns the length of the metrics file that belongs to it, and the trunk when the run was inside a branch.
    """
    state = _broadcast_state(parts, folder, say)
    if state is None:
        say(f"no checkpoint in '{folder}' yet: starting from the beginning")
        return 0, None
    check_fits(state, parts.network.state_dict(), f"run folder '{folder}'")
    num_images, given = state["run"]["clock"]["samples_per_epoch"], run.clock.samples_per_epoch
    if num_images != given:
        raise CheckpointError(
            f"run folder '{folder}' was trained on {num_images} images, the data given has {given}; "
            "resume with the same data, or choose another --output"
        )
    run.load_state_dict(state["run"])
    load_training_state(state, parts.network, parts.optimizer, parts.statistics, parts.scaler)
    if parts.noise and state["noise"]:
        parts.noise.load_state_dict(state["noise"])
    if parts.adaptive and state["adaptive"]:
        parts.adaptive.load_state_dict(state["adaptive"])
    if parts.world.is_main and run.best_step:
        link_best(folder / "checkpoints", run.best_step)
    then = f" (then on {state['world_size']} workers)" if state["world_size"] != parts.world.size else ""
    say(f"resuming after step {run.clock.steps}, epoch {run.epoch:.3f}{then}")
    return int(state["metrics_bytes"]), state["trunk"]


def _broadcast_state(parts: Components, folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    data: bytes | None = None
    problem: MegabatchError | None = None
    if parts.world.is_main:
        try:
            data = newest_whole(folder / "checkpoints", say)
        except MegabatchError as error:
            problem = error
    raise_everywhere(problem)
    if parts.world.size > 1:
        length = torch.tensor([len(data) if data else 0], device=parts.device)
        dist.broadcast(length, src=0)
        num_bytes = int(length.item())
        content = torch.empty(num_bytes, dtype=torch.uint8, device=parts.device)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if num_bytes:
            dist.broadcast(content, src=0)
        data = content.cpu().numpy().tobytes()
    return decode(data, str(folder)) if data else None
