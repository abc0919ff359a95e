"""The numbers that follow from a recipe and a world, printed before the first step."""

from __future__ import annotations

from torch import nn

from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.schedule.batch import count_steps, parse_stages, shard_range
from megabatch.schedule.clock import Clock

__all__ = ["derived_lines"]


def derived_lines(config: Config, clock: Clock, world_size: int, grid: GridShape, network: nn.Module) -> list[str]:
    """Workers x ghosts x accumulation, steps per epoch and in all, and the network's size, one line each."""
    stages = parse_stages(config.train.global_batch_size)
    ghost = config.train.ghost_batch_size
    num_parameters = sum(p.numel() for p in network.parameters())
    total = count_steps(stages, ghost, clock.samples_per_epoch, clock.total_samples)
    limit = f", stopping after {config.train.max_steps:,}" if 0 < config.train.max_steps < total else ""
    lines = [
        f"network        {config.model.name}, {num_parameters:,} parameters, {config.train.precision}",
        f"gradients      {num_parameters * 4 / 1e6:.1f} MB in fp32",
        f"workers        {world_size} in a grid of {grid.text}, gradients by {config.comm.algorithm}",
        f"total batch    {stages} images",
    ]
    for start, global_batch_size in zip(stages.from_epochs, stages.global_batch_sizes, strict=True):
        num_ghosts = global_batch_size // ghost
        counts = sorted({len(shard_range(num_ghosts, world_size, worker)) for worker in (0, world_size - 1)})
        each = " or ".join(str(count) for count in range(counts[0], counts[-1] + 1))
        lines.append(
            f"from epoch {start:<4g}{global_batch_size:,} = {num_ghosts:,} ghosts x {ghost}; "
            f"each worker accumulates {each}; {clock.samples_per_epoch / global_batch_size:.2f} steps an epoch"
        )
    at_most = ""
    if adaptive := config.batch_control.adaptive:
        at_most = "at most "
        lines.append(f"growing        by the noise scale, up to {adaptive.max_global_batch_size:,} images a step")
    if collapse := config.collapse:
        places = ", ".join(f"{epoch:.4g}" for epoch in collapse.at_epochs)
        lines.append(
            f"collapses      of {collapse.epochs:.4g} epochs each, from epoch {places} of the trunk, not counted below"
        )
    lines.append(
        f"in all         {at_most}{total:,} steps, {clock.total_samples:,} images, {clock.total_epochs:g} epochs "
        f"of {clock.samples_per_epoch:,}{limit}"
    )
    return lines
