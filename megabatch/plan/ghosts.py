"""Ghost batches over workers, as the engine lays them: which ghost a plan uses, and how many the busiest worker takes.

A recipe's ghost batch is kept while every worker gets at least one. With more workers than ghosts it must shrink, to a
divisor of every total batch: the next one above a worker's fair share or the next below, whichever makes the shorter
steps. Still smaller ones could balance the last images, but batch-norm would pay for it. Workers that get no ghost
are allowed: 67,840 images on 1,024 workers are 848 ghosts of 80, and 176 workers wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megabatch.errors import ConfigError
from megabatch.plan.workload import Workload
from megabatch.schedule.batch import BatchStages, check_whole_ghosts

__all__ = ["busiest_passes", "fitting_ghost"]

_LEAST_GHOST = 2  # batch-norm needs a variance


def busiest_passes(global_batch_size: int, ghost_batch_size: int, workers: int) -> int:
    """Ghost batches of the worker that has most of them."""
    return -(-(global_batch_size // ghost_batch_size) // workers)


def fitting_ghost(workload: Workload, workers: int, pass_seconds: Callable[[float], float]) -> int:
    """The ghost batch for so many workers; `pass_seconds` tells how long one of a size takes.

    Raises:
        ConfigError: a batch that is not made of whole ghosts, or too small for the workers.
    """
    totals = workload.global_batch_sizes
    check_whole_ghosts(BatchStages(tuple(float(i) for i in range(len(totals))), totals), workload.ghost_batch_size)
    if totals[0] // workload.ghost_batch_size >= workers:
        return workload.ghost_batch_size
    if totals[0] / workers < _LEAST_GHOST:
        raise ConfigError(
            f"total batch {totals[0]:,} on {workers:,} workers leaves {totals[0] / workers:.2g} images each; "
            f"at least {_LEAST_GHOST} are needed: ask for fewer workers or a larger batch"
        )
    common, share = math.gcd(*totals), totals[0] / workers
    sizes = [size for size in range(_LEAST_GHOST, workload.ghost_batch_size + 1) if common % size == 0]
    near = [*[size for size in sizes if size <= share][-1:], *[size for size in sizes if size > share][:1]]

    def epoch_seconds(size: int) -> float:
        return sum(busiest_passes(total, size, workers) * pass_seconds(size) / total for total in totals)

    return min(near, key=lambda size: (epoch_seconds(size), -size))
