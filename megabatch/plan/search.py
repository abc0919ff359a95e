"""The space a plan is chosen from: all-reduce algorithms, grids, bucket sizes, and total batches by stages.

Total batches compete only where epochs by batch are known (a convergence law): without one a larger batch would always
seem better. They are the recipe's own, halved and doubled (the shape of its stages kept); an even number of ghost
batches a worker; and the same with a doubling after a third of the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.shape import GridShape, near_square
from megabatch.errors import ConfigError, MegabatchError
from megabatch.plan.calibrate import StepFit
from megabatch.plan.cluster import Cluster
from megabatch.plan.convergence import ConvergenceLaw
from megabatch.plan.predict import expected_seconds
from megabatch.plan.step import Candidate, ghost_of
from megabatch.plan.workload import Workload
from megabatch.schedule.batch import BatchStages

__all__ = ["BUCKETS_MB", "DRAW", "FLAT_ALGORITHMS", "Space", "best_batch", "best_candidates", "grids_of"]

BUCKETS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, math.inf)
FLAT_ALGORITHMS = ("ring", "halving_doubling", "backend")
"""They do not use the grid."""
LIBRARY_ALGORITHMS = ("backend", "torus", "hierarchical")
"""On a backend with its own collectives the others would only be sends and receives in Python."""
DRAW = 1.01
"""A gain of less than this is no reason to leave what plain DDP does."""

_MANY_WORKERS = 65_536
_GHOSTS_A_WORKER = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)


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
                    mine.append((expected_seconds(cluster, workload, candidate, law, fit), candidate))
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
    candidates: Sequence[Candidate],
    law: ConvergenceLaw,
    fit: StepFit | None = None,
) -> tuple[BatchStages, int]:
    """The total batch that reaches the target soonest on these workers, and how many were tried.

    `candidates` are the best ways to run the recipe's own batch; a way that suits it suits its neighbours, so a whole
    search is made again only for the batch that wins.
    """
    workers = candidates[0].workers
    least, found, tried = math.inf, workload.stages, 0
    for stages in (workload.stages, *_batches(workload, workers, law)):
        load = workload.with_batch(stages)
        try:
            ghost = ghost_of(cluster, load, workers, fit)
            times = [expected_seconds(cluster, load, replace(one, ghost_batch=ghost), law, fit) for one in candidates]
        except MegabatchError:
            continue
        tried += len(times)
        # The recipe's own batch comes first and is not left for a draw.
        if min(times) * (DRAW if math.isfinite(least) else 1.0) < least:
            least, found = min(times), stages
    return found, tried


def grids_of(workers: int) -> list[GridShape]:
    """Rows x columns with at least 2 of each, or the flat grid of a prime; of huge worlds the near-square ones."""
    sizes = [rows for rows in range(2, math.isqrt(workers) + 1) if workers % rows == 0]
    if workers > _MANY_WORKERS:
        sizes = sizes[-6:]
    pairs = {(rows, workers // rows) for rows in sizes} | {(workers // rows, rows) for rows in sizes}
    return [GridShape(pair) for pair in sorted(pairs)] or [GridShape((1, workers))]


def _batches(workload: Workload, workers: int, law: ConvergenceLaw) -> list[BatchStages]:
    """Total batches whose convergence is known, besides the recipe's own."""
    own, ghost = workload.stages, workload.ghost_batch
    found = [
        BatchStages(own.from_epochs, tuple(int(total * factor) for total in own.batch_totals))
        for factor in (0.25, 0.5, 2, 4)
        if all(total * factor % ghost == 0 for total in own.batch_totals)
    ]
    for share in _GHOSTS_A_WORKER:
        total = int(workers * ghost * share)
        if total >= 2 * workers and total % ghost == 0:
            third = round(law.at(total).epochs / 3)
            found += [BatchStages((0.0,), (total,)), BatchStages((0.0, float(third)), (total, 2 * total))]
    least, most = law.batches
    return [one for one in found if least / 2 <= min(one.batch_totals) and max(one.batch_totals) <= most]


def _least(priced: Sequence[tuple[float, Candidate]], usual_mb: float) -> tuple[float, Candidate]:
    """The fastest; of those that are as good as equal, the one with the bucket nearest to the usual."""
    least = min(seconds for seconds, _ in priced)
    equal = [one for one in priced if one[0] <= 1.002 * least]
    return min(equal, key=lambda one: (abs(math.log(min(one[1].bucket_mb, 1e6) / usual_mb)), one[0]))


def _shapes_for(cluster: Cluster, algorithm: str, workers: int) -> list[GridShape]:
    if cluster.calibration is not None:
        return [cluster.calibration.shape]
    if algorithm in FLAT_ALGORITHMS:
        return [near_square(workers) if workers <= _MANY_WORKERS else GridShape((1, workers))]
    return grids_of(workers)
