"""What a checkpoint holds, and how a run continues from it on any number of workers.

The first worker reads and writes the file; its bytes are broadcast, so the other hosts need no shared disk to resume.
Random numbers need no state of their own: the sample order, the augmentation and the seed of every ghost batch are pure
functions of the stored seed and the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.errors import CheckpointError
from megabatch.schedule.clock import Clock
from megabatch.train.build import Workbench
from megabatch.train.checkpoint import check_fits, decode, link_best, newest_whole, save_checkpoint

__all__ = ["RunState", "restore", "save"]


@dataclass
class RunState:
    """What a run carries from update to update besides the weights."""

    clock: Clock
    skipped_updates: int = 0  # non-finite gradients so far
    skipped_in_a_row: int = 0
    best_top1: float = -1.0
    best_update: int = 0
    training_seconds: float = 0.0  # in updates alone
    wall_seconds: float = 0.0  # in the whole loop: updates, evaluations, checkpoints


def save(bench: Workbench, run: RunState, folder: Path, metrics_bytes: int, is_best: bool) -> None:
    """Write a checkpoint; every worker must call it, the first one writes."""
    bench.statistics.publish()
    statistics = bench.statistics.state()
    if not bench.world.is_first:
        return
    state = {
        "seed": bench.config.train.seed,
        "world_size": bench.world.size,
        "metrics_bytes": metrics_bytes,
        "run": asdict(run),
        "model": bench.network.state_dict(),
        "optimizer": bench.optimizer.state_dict(),
        "scaler": bench.scaler.state_dict(),
        "statistics": statistics,
    }
    settings = bench.config.checkpoint
    save_checkpoint(folder / "checkpoints", state, run.clock.updates, settings.keep, best=is_best)


def restore(bench: Workbench, run: RunState, folder: Path, say: Callable[[str], None]) -> int:
    """Continue from the newest whole checkpoint, if any; return the length of the metrics file that belongs to it."""
    state = _broadcast_state(bench, folder, say)
    if state is None:
        say(f"no checkpoint in '{folder}' yet: starting from the beginning")
        return 0
    check_fits(state, bench.network.state_dict(), f"run folder '{folder}'")
    stored = state["run"]
    clock = Clock(**stored.pop("clock"))
    if clock.samples_per_epoch != run.clock.samples_per_epoch:
        raise CheckpointError(
            f"run folder '{folder}' was trained on {clock.samples_per_epoch} pictures, the data given has "
            f"{run.clock.samples_per_epoch}; resume with the same data, or choose another --output"
        )
    run.clock = Clock(clock.samples_per_epoch, run.clock.total_samples, clock.samples, clock.updates)
    for name, value in stored.items():
        setattr(run, name, value)
    bench.network.load_state_dict(state["model"])
    bench.optimizer.load_state_dict(state["optimizer"])
    if bench.scaler.is_enabled():
        bench.scaler.load_state_dict(state["scaler"])
    bench.statistics.load(state["statistics"])
    if bench.world.is_first and run.best_update:
        link_best(folder / "checkpoints", run.best_update)
    then = f" (then on {state['world_size']} workers)" if state["world_size"] != bench.world.size else ""
    say(f"resuming after update {clock.updates}, epoch {clock.epoch:.3f}{then}")
    return int(state["metrics_bytes"])


def _broadcast_state(bench: Workbench, folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    data = newest_whole(folder / "checkpoints", say) if bench.world.is_first else None
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
