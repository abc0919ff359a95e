"""The numbers that follow from a recipe and a world, printed before the first step."""

from __future__ import annotations

from torch import nn

from megabatch.comm.shape import GridShape
from megabatch.config import Config
from megabatch.schedule.batch import count_updates, deal, parse_stages
from megabatch.schedule.clock import Clock

__all__ = ["derived_lines"]


def derived_lines(config: Config, clock: Clock, num_workers: int, grid: GridShape, network: nn.Module) -> list[str]:
    """Workers x ghosts x accumulation, updates per epoch and in all, and the network's size, one line each."""
    stages = parse_stages(config.train.batch_total)
    ghost = config.train.ghost_batch
    num_parameters = sum(p.numel() for p in network.parameters())
    total = count_updates(stages, ghost, clock.samples_per_epoch, clock.total_samples)
    limit = f", stopping after {config.train.max_updates:,}" if 0 < config.train.max_updates < total else ""
    lines = [
        f"network        {config.model.name}, {num_parameters:,} parameters, {config.train.precision}",
        f"gradients      {num_parameters * 4 / 1e6:.1f} MB in fp32",
        f"workers        {num_workers} in a grid of {grid.text}, gradients by {config.comm.algorithm}",
        f"total batch    {stages} pictures",
    ]
    for start, batch_total in zip(stages.from_epochs, stages.batch_totals, strict=True):
        num_ghosts = batch_total // ghost
        counts = sorted({len(deal(num_ghosts, num_workers, worker)) for worker in (0, num_workers - 1)})
        each = " or ".join(str(count) for count in range(counts[0], counts[-1] + 1))
        lines.append(
            f"from epoch {start:<4g}{batch_total:,} = {num_ghosts:,} ghosts x {ghost}; each worker accumulates {each}; "
            f"{clock.samples_per_epoch / batch_total:.2f} updates an epoch"
        )
    at_most = ""
    if adaptive := config.batch_control.adaptive:
        at_most = "at most "
        lines.append(f"growing        by the noise scale, up to {adaptive.max_batch_total:,} pictures an update")
    if collapse := config.collapse:
        places = ", ".join(f"{epoch:.4g}" for epoch in collapse.at_epochs)
        lines.append(
            f"collapses      of {collapse.epochs:.4g} epochs each, from epoch {places} of the trunk, not counted below"
        )
    lines.append(
        f"in all         {at_most}{total:,} updates, {clock.total_samples:,} pictures, {clock.total_epochs:g} epochs "
        f"of {clock.samples_per_epoch:,}{limit}"
    )
    return lines
