"""The space a plan is chosen from: all-reduce algorithms, grids, bucket sizes, and total batches by stages.

Total batches compete only where epochs by batch are known (a convergence law): without one a larger batch would always
seem better. They are the recipe's own and a ladder over the known range, the best rung refined: whole ghost batches,
or the same number of images for every worker, each constant or doubled after a third of the way, and the recipe's
own stages at that size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.shape import GridShape, near_square
from megabatch.errors import ConfigError, MegabatchError
from megabatch.plan.cluster import Cluster
from megabatch.plan.convergence import ConvergenceLaw
from megabatch.plan.predict import expected_seconds
from megabatch.plan.step import Candidate, ghost_of
from megabatch.plan.step_fit import StepFit
from megabatch.plan.workload import Workload
from megabatch.schedule.batch import BatchStages

__all__ = ["BUCKETS_MB", "DRAW", "FLAT_ALGORITHMS", "Space", "best_batch", "best_candidates", "grids_of", "loads_near"]

BUCKETS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, math.inf)
FLAT_ALGORITHMS = ("ring", "halving_doubling", "backend")
"""They do not use the grid."""
LIBRARY_ALGORITHMS = ("backend", "torus", "hierarchical")
"""On a backend with its own collectives the others would only be sends and receives in Python."""
DRAW = 1.01
"""A gain of less than this is no reason to leave what plain DDP does."""

_MANY_WORKERS = 65_536
_RUNG = math.sqrt(2)
_FINER = (0.75, 0.84, 0.92, 1.08, 1.19, 1.33)
"""Around the best rung of the ladder."""


@dataclass(frozen=True, slots=True)
class Space:
    """What the user has fixed; empty or None: everything is tried."""

    algorithms: tuple[str, ...] = ()
    grid: GridShape | None = None
    bucket_mb: float | None = None


def best_candidates(
    cluster: Cluster,
    workload: Workload,
    workers: int,
    space: Space,
    law: ConvergenceLaw | None = None,
    fit: StepFit | None = None,
) -> tuple[list[Candidate], int]:
    """The best candidate of each algorithm, best first, and how many were tried.

    Raises:
        ConfigError: nothing fits, with the reason of the last refusal.
    """
    names = space.algorithms or (LIBRARY_ALGORITHMS if cluster.backend == "nccl" else tuple(ALGORITHMS))
    buckets = (space.bucket_mb,) if space.bucket_mb else BUCKETS_MB
    ghost = ghost_of(cluster, workload, workers, fit)
    start = cluster.initialisation_seconds.value  # all have it alike: what is a draw is decided without it
    best: list[tuple[float, Candidate]] = []
    tried, refusal = 0, ""
    for name in names if workers > 1 else ("backend",):
        mine: list[tuple[float, Candidate]] = []
        for shape in [space.grid] if space.grid else _shapes_for(cluster, name, workers):
            for size in buckets if workers > 1 else (workload.bucket_mb,):
                candidate = Candidate(workers, name, shape, size, ghost)
                tried += 1
                try:
                    shape.check_fits(workers)
                    mine.append((expected_seconds(cluster, workload, candidate, law, fit) - start, candidate))
                except MegabatchError as error:
                    refusal = str(error)
        if mine:
            best.append(_least(mine, workload.bucket_mb))
    if not best:
        raise ConfigError(refusal)
    least = min(seconds for seconds, _ in best)
    best.sort(key=lambda one: 0.0 if one[1].algorithm == "backend" and one[0] < DRAW * least else one[0])
    return [candidate for _, candidate in best], tried


def best_batch(
    cluster: Cluster,
    workload: Workload,
    workers: int,
    candidates: Sequence[Candidate],
    space: Space,
    law: ConvergenceLaw,
    fit: StepFit | None = None,
) -> tuple[Workload, int]:
    """The workload at the total batch that reaches the target soonest on these workers, and how many were tried.

    `candidates` are the best ways to run the recipe's own batch, none when it cannot be run. They and those of a
    middling batch suit the others well enough to compare: a whole search is made again only for the one that wins.

    Raises:
        ConfigError: no batch with known convergence fits the workers.
    """
    least, most = law.batches[0] / 2, law.batches[1]
    ladder = [least * _RUNG**step for step in range(math.floor(math.log(most / least, _RUNG)) + 1)]
    constant = [load for total in ladder for load in loads_near(workload, workers, total, law, doubled=False)]
    loads = [workload, *constant]
    # Buckets and grids that suit the middle of the ladder need not suit the recipe's batch, and the other way round.
    others, tried = _first_candidates(cluster, [*constant[len(constant) // 2 :], *loads], workers, space, law, fit)
    candidates = list(dict.fromkeys([*candidates, *others]))
    priced = _price(cluster, loads, candidates, law, fit)
    best = min(priced, key=lambda one: one[0])[1].stages.global_batch_sizes[0]
    finer = [load for part in _FINER for load in loads_near(workload, workers, part * best, law)]
    priced += _price(cluster, finer, candidates, law, fit)
    seconds, found = min(priced, key=lambda one: one[0])
    own, start = next((one for one, load in priced if load is workload), math.inf), cluster.initialisation_seconds.value
    chosen = workload if own - start < DRAW * (seconds - start) else found
    return chosen, tried + len(priced) * len(candidates)


def _first_candidates(
    cluster: Cluster,
    loads: Sequence[Workload],
    workers: int,
    space: Space,
    law: ConvergenceLaw,
    fit: StepFit | None,
) -> tuple[list[Candidate], int]:
    """The best ways to run the first of the loads that can be run at all."""
    for load in loads:
        with contextlib.suppress(MegabatchError):
            return best_candidates(cluster, load, workers, space, law, fit)
    raise ConfigError(
        f"no total batch from {law.batches[0] / 2:,.0f} to {law.batches[1]:,.0f}, whose convergence is known, fits "
        f"{workers:,} workers; ask for fewer, or give batches with --batch"
    )


def _price(
    cluster: Cluster,
    loads: Sequence[Workload],
    candidates: Sequence[Candidate],
    law: ConvergenceLaw,
    fit: StepFit | None,
) -> list[tuple[float, Workload]]:
    """Seconds of every load that can be run, by the best of the candidates."""
    found = []
    for load in loads:
        with contextlib.suppress(MegabatchError):
            ghost = ghost_of(cluster, load, candidates[0].workers, fit)
            ways = [replace(one, ghost_batch_size=ghost) for one in candidates]
            found.append((min(expected_seconds(cluster, load, way, law, fit) for way in ways), load))
    return found


def loads_near(
    workload: Workload, workers: int, global_batch_size: float, law: ConvergenceLaw, *, doubled: bool = True
) -> list[Workload]:
    """The recipe near a total batch, where convergence is known: constant, and `doubled` after a third of the way.

    Either whole ghost batches, wherever they fall, or as many images for every worker, with a smaller ghost where
    that is needed; and the recipe's own stages at that size.
    """
    own, ghost = workload.stages, workload.ghost_batch_size
    whole = max(1, round(global_batch_size / ghost)) * ghost
    share = global_batch_size / workers
    even = max(1, round(share / ghost)) * ghost if share >= ghost else max(2, 2 * round(share / 2))
    sizes = {(whole, ghost), (even * workers, min(ghost, even))}
    found = []
    for total, size in sorted(sizes):
        third = round(law.at(total).epochs / 3, 1)
        found.append(workload.with_batch(BatchStages((0.0,), (total,)), size))
        if doubled and third > 0:
            found.append(workload.with_batch(BatchStages((0.0, third), (total, 2 * total)), size))
    if len(own.global_batch_sizes) > 1:
        factor = global_batch_size / own.global_batch_sizes[0]
        totals = tuple(max(1, round(factor * total / ghost)) * ghost for total in own.global_batch_sizes)
        found.append(workload.with_batch(BatchStages(own.from_epochs, totals), fixed=False))
    least, most = law.batches
    return [
        load
        for load in found
        if least / 2 <= load.stages.global_batch_sizes[0] and max(load.stages.global_batch_sizes) <= most
    ]


def grids_of(workers: int) -> list[GridShape]:
    """Rows x columns with at least 2 of each, or the flat grid of a prime; of huge worlds the near-square ones."""
    sizes = [rows for rows in range(2, math.isqrt(workers) + 1) if workers % rows == 0]
    if workers > _MANY_WORKERS:
        sizes = sizes[-6:]
    pairs = {(rows, workers // rows) for rows in sizes} | {(workers // rows, rows) for rows in sizes}
    return [GridShape(pair) for pair in sorted(pairs)] or [GridShape((1, workers))]


def _least(priced: Sequence[tuple[float, Candidate]], usual_mb: float) -> tuple[float, Candidate]:
    """The fastest; of those that are as good as equal, the one with the bucket nearest to the usual."""
    least = min(seconds for seconds, _ in priced)
    equal = [one for one in priced if one[0] <= 1.002 * least]
    return min(equal, key=lambda one: (abs(math.log(min(one[1].bucket_mb, 1e6) / usual_mb)), one[0]))


def _shapes_for(cluster: Cluster, algorithm: str, workers: int) -> list[GridShape]:
    if workers == 1:
        return [GridShape((1, 1))]
    if cluster.calibration is not None:
        return [cluster.calibration.shape]
    if algorithm in FLAT_ALGORITHMS:
        return [near_square(workers) if workers <= _MANY_WORKERS else GridShape((1, workers))]
    return grids_of(workers)
