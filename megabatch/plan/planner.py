"""Searches workers, algorithm, grid, bucket size and batch for least time, least cost, a deadline or a budget.

Every combination is priced by its middle; the best of each number of workers and batch gets the full prediction.
The Pareto front holds what nothing else beats in both time and cost. `what_would_help` asks the same model what the
chosen plan would gain if one thing were twice as good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.shape import GridShape, near_square
from megabatch.errors import ConfigError, MegabatchError
from megabatch.plan.calibrate import StepFit
from megabatch.plan.cluster import KNOBS, Cluster
from megabatch.plan.convergence import ConvergenceLaw
from megabatch.plan.predict import Prediction, expected_seconds, predict
from megabatch.plan.step import Candidate
from megabatch.plan.workload import Workload
from megabatch.schedule.batch import BatchStages

__all__ = ["Goal", "Help", "PlanResult", "grids_of", "plan", "what_would_help", "worker_counts"]

BUCKETS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, math.inf)
FLAT_ALGORITHMS = ("ring", "halving_doubling", "backend")
"""They do not use the grid."""
LIBRARY_ALGORITHMS = ("backend", "torus", "hierarchical")
"""On a backend with its own collectives the others would only be sends and receives in Python."""

_WORDS = {
    "compute": "compute twice as fast",
    "worker link": "twice the rate between workers of a node",
    "NIC": "twice the NIC rate",
    "rack uplink": "twice the rack uplinks",
    "wire latency": "half the wire latency",
    "software latency": "half the software latency",
    "stragglers": "half the scatter of workers",
    "loader": "twice the loader rate",
}
_DRAW = 1.01
_MANY_WORKERS = 65_536
_LARGEST_SEARCH = 4096
_FASTER = {"wire latency": 0.5, "software latency": 0.5, "stragglers": 0.5, "compute": 0.5}


@dataclass(frozen=True, slots=True)
class Goal:
    """What the user wants; seconds count from the first update on unless the bill is asked for.

    kind: "time" or "cost". deadline_seconds: the cheapest that is done by then. budget: the fastest that costs no more.
    """

    kind: str = "time"
    deadline_seconds: float = math.inf
    budget: float = math.inf


@dataclass(frozen=True, slots=True)
class Help:
    """What one change would gain: part of the total time saved (negative: lost)."""

    what: str
    gain: float


@dataclass(frozen=True)
class PlanResult:
    """The candidates worth showing, fastest first; those of `front` are on the Pareto front."""

    chosen: Prediction
    candidates: tuple[Prediction, ...]
    front: tuple[Prediction, ...]
    helps: tuple[Help, ...]
    num_considered: int
    reason: str


def plan(
    cluster: Cluster,
    workload: Workload,
    workers: Sequence[int],
    goal: Goal,
    *,
    batches: Sequence[BatchStages] = (),
    algorithms: Sequence[str] = (),
    grid: GridShape | None = None,
    bucket_mb: float | None = None,
    law: ConvergenceLaw | None = None,
    fit: StepFit | None = None,
) -> PlanResult:
    """Search and choose.

    Raises:
        ConfigError: nothing fits, with the reason of the last refusal; or the goal cannot be met, with the nearest.
    """
    found: list[Prediction] = []
    considered, refusal = 0, "nothing to try"
    for stages in batches or (workload.stages,):
        load = workload.with_batch(stages)
        for count in workers:
            try:
                cluster.check_holds(count)
                best, tried = _best_candidates(cluster, load, count, algorithms, grid, bucket_mb, law, fit)
                considered += tried
                found += [predict(cluster, load, candidate, law=law, fit=fit) for candidate in best]
            except MegabatchError as error:
                refusal = str(error)
    if not found:
        raise ConfigError(refusal)
    found.sort(key=lambda one: one.total.middle / (_DRAW if one.candidate.algorithm == "backend" else 1.0))
    chosen, reason = _choose(found, goal)
    load = workload.with_batch(_stages_of(chosen, batches, workload))
    helps = what_would_help(cluster, load, chosen, law, fit)
    return PlanResult(chosen, tuple(found), tuple(_front(found)), tuple(helps), considered, reason)


def worker_counts(cluster: Cluster, text: str | None) -> list[int]:
    """Read "1024", "256,1024" or "64..4096" (doubling); without it, doubling from one node to all of the cluster."""
    per_node = cluster.workers_per_node
    if text is None:
        most = min(cluster.max_workers, _LARGEST_SEARCH)
        return _doubling(per_node, int(most))
    try:
        if ".." in text:
            low, high = (int(part.replace("_", "")) for part in text.split(".."))
            if low < 1 or high < low:
                raise ValueError
            return _doubling(low, high)
        counts = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"workers '{text}' cannot be read; write 1024, 256,1024 or 64..4096") from None
    if min(counts) < 1:
        raise ConfigError(f"workers '{text}': at least 1 is needed")
    return counts


def grids_of(workers: int) -> list[GridShape]:
    """Rows x columns with at least 2 of each, or the flat grid of a prime; of huge worlds the near-square ones."""
    sizes = [rows for rows in range(2, math.isqrt(workers) + 1) if workers % rows == 0]
    if workers > _MANY_WORKERS:
        sizes = sizes[-6:]
    pairs = {(rows, workers // rows) for rows in sizes} | {(workers // rows, rows) for rows in sizes}
    return [GridShape(pair) for pair in sorted(pairs)] or [GridShape((1, workers))]


def what_would_help(
    cluster: Cluster, workload: Workload, chosen: Prediction, law: ConvergenceLaw | None, fit: StepFit | None
) -> list[Help]:
    """What the chosen plan would gain by each change, most first; without a law a larger batch is not judged."""
    now = chosen.total.middle
    found = []
    for knob in KNOBS:
        if fit is not None and knob in ("compute", "stragglers"):
            continue  # the fit holds them
        better = _FASTER.get(knob, 2.0)
        then = expected_seconds(cluster.changed(knob, better), workload, chosen.candidate, law, fit)
        found.append(Help(_WORDS[knob], 1 - then / now))
    if law is not None:
        doubled = BatchStages(workload.stages.from_epochs, tuple(2 * total for total in workload.stages.batch_totals))
        then = expected_seconds(cluster, workload.with_batch(doubled), chosen.candidate, law, fit)
        found.append(Help("twice the total batch", 1 - then / now))
    start = chosen.time_parts["initialisation"]
    if start:
        found.append(Help("half the initialisation", 0.5 * start / now))
    return sorted(found, key=lambda one: -one.gain)


def _best_candidates(
    cluster: Cluster,
    workload: Workload,
    workers: int,
    algorithms: Sequence[str],
    grid: GridShape | None,
    bucket_mb: float | None,
    law: ConvergenceLaw | None,
    fit: StepFit | None,
) -> tuple[list[Candidate], int]:
    """The best candidate of each algorithm, best first, and how many were tried."""
    names = tuple(algorithms) or (LIBRARY_ALGORITHMS if cluster.backend == "nccl" else tuple(ALGORITHMS))
    buckets = (bucket_mb,) if bucket_mb else BUCKETS_MB
    best: list[tuple[float, Candidate]] = []
    tried, refusal = 0, ""
    for name in names if workers > 1 else ("backend",):
        mine: list[tuple[float, Candidate]] = []
        for shape in [grid] if grid else _shapes_for(cluster, name, workers):
            for size in buckets if workers > 1 else (workload.bucket_mb,):
                candidate = Candidate(workers, name, shape, size)
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
    # A draw is no reason to leave what plain DDP does.
    least = min(seconds for seconds, _ in best)
    best.sort(key=lambda one: 0.0 if one[1].algorithm == "backend" and one[0] < _DRAW * least else one[0])
    return [candidate for _, candidate in best], tried


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


def _choose(found: Sequence[Prediction], goal: Goal) -> tuple[Prediction, str]:
    def bill(one: Prediction) -> float:
        return one.cost.middle if one.cost else one.node_hours.middle

    within = [one for one in found if one.training.middle <= goal.deadline_seconds and bill(one) <= goal.budget]
    if not within:
        fastest, cheapest = min(found, key=lambda one: one.training.middle), min(found, key=bill)
        unit = fastest.currency or "node hours"
        raise ConfigError(
            f"no candidate meets the goal: the fastest takes {fastest.training.middle:,.0f} s, the cheapest costs "
            f"{bill(cheapest):,.2f} {unit}; relax the deadline or the budget"
        )
    if goal.kind == "cost" or math.isfinite(goal.deadline_seconds):
        what = (
            f"cheapest within {goal.deadline_seconds:,.0f} s" if math.isfinite(goal.deadline_seconds) else "least cost"
        )
        return min(within, key=lambda one: (bill(one), one.total.middle)), what
    what = f"fastest for at most {goal.budget:,.2f}" if math.isfinite(goal.budget) else "least time"
    return within[0], what


def _front(found: Sequence[Prediction]) -> list[Prediction]:
    """Those that no other beats in both time and node hours, fastest first."""
    front: list[Prediction] = []
    for one in sorted(found, key=lambda each: (each.total.middle, each.node_hours.middle)):
        if not front or one.node_hours.middle < front[-1].node_hours.middle * (1 - 1e-9):
            front.append(one)
    return front


def _stages_of(chosen: Prediction, batches: Sequence[BatchStages], workload: Workload) -> BatchStages:
    return next((stages for stages in batches if str(stages) == chosen.batch), workload.stages)


def _doubling(low: int, high: int) -> list[int]:
    counts = [low]
    while counts[-1] * 2 < high:
        counts.append(counts[-1] * 2)
    return [*counts, high] if high > counts[-1] else counts
