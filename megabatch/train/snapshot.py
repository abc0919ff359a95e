"""What a checkpoint holds, and how a run continues from it on any number of workers.

The main rank reads and writes the file; its bytes are broadcast, so the other hosts need no shared disk to resume.
Random numbers need no state of their own: the sample order, the augmentation and the seed of every ghost batch are pure
functions of the stored seed and the clock. Inside a branch the checkpoint also holds the trunk as the branch left it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.errors import CheckpointError
from megabatch.schedule.clock import Clock
from megabatch.train.branch import copied
from megabatch.train.build import Workbench
from megabatch.train.checkpoint import check_fits, decode, link_best, newest_whole, save_checkpoint

__all__ = ["RunState", "capture", "load_training_state", "restore", "save"]

TrainingState = dict[str, Any]


@dataclass
class RunState:
    """What a run carries from step to step besides the weights."""

    clock: Clock  # of the phase that is going on; its steps count over all phases
    phase: int = 0  # its number
    trunk: Clock | None = None  # where the trunk waits while a branch goes on
    seen_samples: int = 0  # images of all phases
    members: list[dict[str, Any]] = field(default_factory=list)  # the branches that are done
    trunk_top1: float | None = None  # of its last evaluation
    skipped_steps: int = 0  # non-finite gradients so far
    skipped_in_a_row: int = 0
    best_top1: float = -1.0
    best_step: int = 0
    training_seconds: float = 0.0  # in steps alone
    wall_seconds: float = 0.0  # in the whole loop: steps, evaluations, checkpoints

    @property
    def epoch(self) -> float:
        """How far the weights have come: a branch counts on from where it left the trunk."""
        return self.clock.epoch + (self.trunk.epoch if self.trunk else 0.0)


def training_state(bench: Workbench) -> TrainingState:
    """What training changes; every worker must call it. Tensors are the live ones."""
    return {
        "model": bench.network.state_dict(),
        "optimizer": bench.optimizer.state_dict(),
        "scaler": bench.scaler.state_dict(),
        "statistics": bench.statistics.state(),
    }


def capture(bench: Workbench) -> TrainingState:
    """A copy of what training changes, in the host's memory, to return to; every worker must call it."""
    state: TrainingState = copied(training_state(bench))
    return state


def load_training_state(bench: Workbench, state: TrainingState) -> None:
    """Return to `state`."""
    bench.network.load_state_dict(state["model"])
    bench.optimizer.load_state_dict(state["optimizer"])
    if bench.scaler.is_enabled():
        bench.scaler.load_state_dict(state["scaler"])
    bench.statistics.load(state["statistics"])


def save(
    bench: Workbench, run: RunState, trunk: TrainingState | None, folder: Path, metrics_bytes: int, is_best: bool
) -> None:
    """Write a checkpoint; every worker must call it, the first one writes. `trunk` is what a branch returns to."""
    state = training_state(bench)
    if not bench.world.is_main:
        return
    state |= {
        "seed": bench.config.train.seed,
        "world_size": bench.world.size,
        "metrics_bytes": metrics_bytes,
        "run": asdict(run),
        "trunk": trunk,
        "noise": bench.noise.state_dict() if bench.noise else None,
        "adaptive": bench.adaptive.state() if bench.adaptive else None,
    }
    settings = bench.config.checkpoint
    save_checkpoint(folder / "checkpoints", state, run.clock.steps, settings.keep, best=is_best)


def restore(
    bench: Workbench, run: RunState, folder: Path, say: Callable[[str], None]
) -> tuple[int, TrainingState | None]:
    """Continue from the newest whole checkpoint, if any.

    Returns the length of the metrics file that belongs to it, and the trunk when the run was inside a branch.
    """
    state = _broadcast_state(bench, folder, say)
    if state is None:
        say(f"no checkpoint in '{folder}' yet: starting from the beginning")
        return 0, None
    check_fits(state, bench.network.state_dict(), f"run folder '{folder}'")
    stored = state["run"]
    clock = Clock(**stored.pop("clock"))
    if clock.samples_per_epoch != run.clock.samples_per_epoch:
        raise CheckpointError(
            f"run folder '{folder}' was trained on {clock.samples_per_epoch} images, the data given has "
            f"{run.clock.samples_per_epoch}; resume with the same data, or choose another --output"
        )
    trunk_clock = stored.pop("trunk", None)
    run.clock, run.trunk = clock, Clock(**trunk_clock) if trunk_clock else None
    for name, value in stored.items():
        setattr(run, name, value)
    load_training_state(bench, state)
    if bench.noise and state["noise"]:
        bench.noise.load_state_dict(state["noise"])
    if bench.adaptive and state["adaptive"]:
        bench.adaptive.load(state["adaptive"])
    if bench.world.is_main and run.best_step:
        link_best(folder / "checkpoints", run.best_step)
    then = f" (then on {state['world_size']} workers)" if state["world_size"] != bench.world.size else ""
    say(f"resuming after step {clock.steps}, epoch {run.epoch:.3f}{then}")
    return int(state["metrics_bytes"]), state["trunk"]


def _broadcast_state(bench: Workbench, folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    data = newest_whole(folder / "checkpoints", say) if bench.world.is_main else None
    if bench.world.size > 1:
        length = torch.tensor([len(data) if data else 0], device=bench.device)
        dist.broadcast(length, src=0)
        num_bytes = int(length.item())
        content = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if num_bytes:
            dist.broadcast(content, src=0)
        data = content.cpu().numpy().tobytes()
    return decode(data, str(folder)) if data else None
