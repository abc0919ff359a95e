"""Plans: every combination is priced by its middle, the best of each kind is estimated in full, and one is chosen.

Candidates differ in workers, all-reduce algorithm, grid and bucket size. Global batches compete only where epochs by
batch are known (a convergence law): without one a larger batch would always seem better. They are the recipe's own and
a ladder over the known range, the best rung refined: whole ghost batches, or the same number of images for every
worker, each constant or doubled after a third of the way, and the recipe's own stages at that size.

The choice is for least time, least cost, a deadline or a budget. The Pareto front holds what nothing else beats in both
time and cost.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megabatch.comm.phases import ALGORITHMS, LIBRARY_ALGORITHMS
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError, MegabatchError
from megabatch.plan.cluster import Cluster
from megabatch.plan.convergence import ConvergenceLaw
from megabatch.plan.estimate import INITIALISATION, Estimate, Estimator, Sensitivity
from megabatch.plan.step import Candidate
from megabatch.plan.workload import Workload
from megabatch.schedule.batch import BatchStages

FLAT_ALGORITHMS = ("ring", "halving_doubling", "backend")
"""They do not use the grid."""

_BUCKETS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, math.inf)
_DRAW = 1.01
"""A gain of less than this is no reason to leave what plain DDP does."""
_MANY_WORKERS = 65_536
_NO_GAIN = 1e-6
_RUNG = math.sqrt(2)
_FINER = (0.75, 0.84, 0.92, 1.08, 1.19, 1.33)
"""Around the best rung of the ladder."""


@dataclass(frozen=True, slots=True)
class Space:
    """What the user has fixed; empty or None: everything is tried."""

    algorithms: tuple[str, ...] = ()
    grid: GridShape | None = None
    bucket_mb: float | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """What the user wants; seconds count from the first step on unless the bill is asked for.

    kind: "time" or "cost". deadline_seconds: the cheapest that is done by then. budget: the fastest that costs no more.
    """

    kind: str = "time"
    deadline_seconds: float = math.inf
    budget: float = math.inf


@dataclass(frozen=True)
class PlanResult:
    """The candidates worth showing, fastest first; those of `front` are on the Pareto front.

    load: the workload at the global batch of the choice. left_out: numbers of workers, or batches, that were asked for
    and cannot be, each with its reason.
    """

    chosen: Estimate
    load: Workload
    candidates: tuple[Estimate, ...]
    front: tuple[Estimate, ...]
    sensitivity: tuple[Sensitivity, ...]
    num_considered: int
    reason: str
    left_out: tuple[str, ...] = ()

    @property
    def binding(self) -> str:
        """What would save most if it were better: of the whole, and of the training where that is something else."""
        found = [one.binding for one in self.sensitivity if one.gain > _NO_GAIN]
        first, second, *_ = *found, *[self.chosen.step_time.largest_part] * 2
        return first if first != INITIALISATION else f"{INITIALISATION} (the training itself by {second})"


class _Search:
    """What was found so far: estimates, how many candidates were priced, and what cannot be, with its reason."""

    def __init__(self, space: Space) -> None:
        self.space, self.num_considered = space, 0
        self.found: list[tuple[Estimate, Estimator]] = []
        self.left_out: dict[str, str] = {}

    def run(self, at: Estimator, workers: int, what: str) -> list[Candidate]:
        """Estimate the best candidates: one that cannot be estimated does not stop the others."""
        try:
            at.cluster.check_holds(workers)
            best, tried = best_candidates(at, workers, self.space)
        except MegabatchError as error:
            self.left_out[what] = str(error)
            return []
        self.num_considered += tried
        for one in best:
            try:
                self.found.append((at.estimate(one), at))
            except MegabatchError as error:
                self.left_out[f"{one.workers:,} workers, {one.algorithm}"] = str(error)
        return best

    def run_best_batch(self, estimator: Estimator, workers: int, candidates: Sequence[Candidate]) -> None:
        """The same at the global batch that reaches the target soonest, where that is not the recipe's own."""
        try:
            better, tried = best_batch(estimator, workers, candidates, self.space)
        except MegabatchError as error:
            self.left_out[f"{workers:,} workers"] = str(error)
            return
        self.num_considered += tried
        if better is not estimator:
            self.run(better, workers, f"{workers:,} workers")


def plan(
    estimator: Estimator,
    workers: Sequence[int],
    goal: Goal,
    *,
    batches: Sequence[BatchStages] = (),
    space: Space | None = None,
) -> PlanResult:
    """Search and choose. Without `batches` the recipe's own is tried, and with a convergence law others beside it.

    Raises:
        ConfigError: nothing fits, with the reason of the last refusal; or the goal cannot be met, with the nearest.
    """
    own = [estimator.at(estimator.workload.with_batch(stages)) for stages in batches] or [estimator]
    search = _Search(space or Space())
    for count in workers:
        best: list[Candidate] = []
        for at in own:
            of_batch = f", batch {at.workload.stages}" if len(own) > 1 else ""
            best = search.run(at, count, f"{count:,} workers{of_batch}")
        if estimator.convergence is not None and not batches and count <= estimator.cluster.max_workers:
            search.run_best_batch(estimator, count, best)
    found, left_out = search.found, search.left_out
    if not found:
        raise ConfigError(list(left_out.values())[-1] if left_out else "nothing to try; name workers")
    found.sort(key=lambda one: one[0].training.middle / (_DRAW if one[0].candidate.algorithm == "backend" else 1.0))
    estimates = [one for one, _ in found]
    chosen, reason = _choose(estimates, goal)
    at = next(at for one, at in found if one is chosen)
    served = {f"{one.candidate.workers:,} workers" for one in estimates}
    reasons = tuple(f"{what}: {why}" for what, why in left_out.items() if what not in served)
    front, gains = tuple(_front(estimates)), tuple(at.sensitivity(chosen))
    return PlanResult(chosen, at.workload, tuple(estimates), front, gains, search.num_considered, reason, reasons)


def best_candidates(estimator: Estimator, workers: int, space: Space) -> tuple[list[Candidate], int]:
    """The best candidate of each algorithm, best first, and how many were tried."""
    cluster, usual_mb = estimator.cluster, estimator.workload.bucket_mb
    names = space.algorithms or (LIBRARY_ALGORITHMS if cluster.backend == "nccl" else tuple(ALGORITHMS))
    buckets = (space.bucket_mb,) if space.bucket_mb else _BUCKETS_MB
    ghost = estimator.step.ghost_batch_size(workers)
    start = cluster.initialisation_seconds.value  # all have it alike: what is a draw is decided without it
    best: list[tuple[float, Candidate]] = []
    tried, refusal = 0, ""
    for name in names if workers > 1 else ("backend",):
        mine: list[tuple[float, Candidate]] = []
        for shape in [space.grid] if space.grid else _shapes_for(cluster, name, workers):
            for size in buckets if workers > 1 else (usual_mb,):
                candidate = Candidate(workers, name, shape, size, ghost)
                tried += 1
                try:
                    shape.check_fits(workers)
                    mine.append((estimator.total_seconds(candidate) - start, candidate))
                except MegabatchError as error:
                    refusal = str(error)
        if mine:
            best.append(_least(mine, usual_mb))
    if not best:
        raise ConfigError(refusal)
    least = min(seconds for seconds, _ in best)
    best.sort(key=lambda one: 0.0 if one[1].algorithm == "backend" and one[0] < _DRAW * least else one[0])
    return [candidate for _, candidate in best], tried


def best_batch(
    estimator: Estimator, workers: int, candidates: Sequence[Candidate], space: Space
) -> tuple[Estimator, int]:
    """The estimator at the global batch that reaches the target soonest on these workers, and how many were tried.

    `candidates` are the best ways to run the recipe's own batch, none when it cannot be run. They and those of a
    middling batch suit the others well enough to compare: a whole search is made again only for the one that wins.
    """
    law, workload = estimator.convergence, estimator.workload
    assert law is not None
    least, most = law.batches[0] / 2, law.batches[1]
    ladder = [least * _RUNG**step for step in range(math.floor(math.log(most / least, _RUNG)) + 1)]
    near = [load for total in ladder for load in loads_near(workload, workers, total, law, doubled=False)]
    constant = [estimator.at(load) for load in near]
    # Buckets and grids that suit the middle of the ladder need not suit the recipe's batch, and the other way round.
    others, tried = _first_candidates([*constant[len(constant) // 2 :], estimator, *constant], workers, space)
    candidates = list(dict.fromkeys([*candidates, *others]))
    priced = _price([estimator, *constant], candidates)
    best = min(priced, key=lambda one: one[0])[1].workload.stages.global_batch_sizes[0]
    finer = [estimator.at(load) for part in _FINER for load in loads_near(workload, workers, part * best, law)]
    priced += _price(finer, candidates)
    seconds, found = min(priced, key=lambda one: one[0])
    start = estimator.cluster.initialisation_seconds.value
    own = next((one for one, at in priced if at is estimator), math.inf)
    return estimator if own - start < _DRAW * (seconds - start) else found, tried + len(priced) * len(candidates)


def _first_candidates(loads: Sequence[Estimator], workers: int, space: Space) -> tuple[list[Candidate], int]:
    """The best ways to run the first of the loads that can be run at all."""
    for at in loads:
        with contextlib.suppress(MegabatchError):
            return best_candidates(at, workers, space)
    law = loads[0].convergence
    assert law is not None
    raise ConfigError(
        f"no global batch from {law.batches[0] / 2:,.0f} to {law.batches[1]:,.0f}, whose convergence is known, fits "
        f"{workers:,} workers; ask for fewer, or give batches with --batch"
    )


def _price(loads: Sequence[Estimator], candidates: Sequence[Candidate]) -> list[tuple[float, Estimator]]:
    """Seconds of every load that can be run, by the best of the candidates."""
    found = []
    for at in loads:
        with contextlib.suppress(MegabatchError):
            ghost = at.step.ghost_batch_size(candidates[0].workers)
            ways = [replace(one, ghost_batch_size=ghost) for one in candidates]
            found.append((min(at.total_seconds(way) for way in ways), at))
    return found


def loads_near(
    workload: Workload, workers: int, global_batch_size: float, law: ConvergenceLaw, *, doubled: bool = True
) -> list[Workload]:
    """The recipe near a global batch, where convergence is known: constant, and `doubled` after a third of the way.

    Either whole ghost batches, wherever they fall, or as many images for every worker, with a smaller ghost where
    that is needed; and the recipe's own stages at that size.
    """
    own, ghost = workload.stages, workload.ghost_batch_size
    whole = max(1, round(global_batch_size / ghost)) * ghost
    share = global_batch_size / workers
    even = max(1, round(share / ghost)) * ghost if share >= ghost else max(2, 2 * round(share / 2))
    found = []
    for total, size in sorted({(whole, ghost), (even * workers, min(ghost, even))}):
        third = round(law.at(total).epochs / 3, 1)
        found.append(workload.with_batch(BatchStages((0.0,), (total,)), size))
        if doubled and third > 0:
            found.append(workload.with_batch(BatchStages((0.0, third), (total, 2 * total)), size))
    if len(own.global_batch_sizes) > 1:
        factor = global_batch_size / own.global_batch_sizes[0]
        totals = tuple(max(1, round(factor * total / ghost)) * ghost for total in own.global_batch_sizes)
        found.append(workload.with_batch(BatchStages(own.from_epochs, totals), fixed=False))
    least, most = law.batches[0] / 2, law.batches[1]
    sizes = ((load, load.stages.global_batch_sizes) for load in found)
    return [load for load, totals in sizes if least <= totals[0] and max(totals) <= most]


def grids_of(workers: int) -> list[GridShape]:
    """Rows x columns with at least 2 of each, or the flat grid of a prime; of huge worlds the near-square ones."""
    sizes = [rows for rows in range(2, math.isqrt(workers) + 1) if workers % rows == 0]
    if workers > _MANY_WORKERS:
        sizes = sizes[-6:]
    pairs = {(rows, workers // rows) for rows in sizes} | {(workers // rows, rows) for rows in sizes}
    return [GridShape(pair) for pair in sorted(pairs)] or [GridShape((1, workers))]


def _shapes_for(cluster: Cluster, algorithm: str, workers: int) -> list[GridShape]:
    """The grids on which an algorithm is tried; one where the grid makes no difference."""
    if workers == 1:
        return [GridShape((1, 1))]
    if cluster.calibration is not None:
        return [cluster.calibration.shape]
    if algorithm in FLAT_ALGORITHMS:
        row = min(cluster.workers_per_node, workers)  # as the run itself would lay them out: a row is a host
        return [GridShape((workers // row, row)) if workers % row == 0 else GridShape((1, workers))]
    return grids_of(workers)


def _least(priced: Sequence[tuple[float, Candidate]], usual_mb: float) -> tuple[float, Candidate]:
    """The fastest; of those that are as good as equal, the one with the bucket nearest to the usual."""
    least = min(seconds for seconds, _ in priced)
    equal = [one for one in priced if one[0] <= 1.002 * least]
    return min(equal, key=lambda one: (abs(math.log(min(one[1].bucket_mb, 1e6) / usual_mb)), one[0]))


def _choose(found: Sequence[Estimate], goal: Goal) -> tuple[Estimate, str]:
    """The estimate that meets the goal best, and why it is the one."""
    within = [one for one in found if one.training.middle <= goal.deadline_seconds and one.bill.middle <= goal.budget]
    if not within:
        fastest, cheapest = min(one.training.middle for one in found), min(one.bill.middle for one in found)
        raise ConfigError(
            f"no candidate meets the goal: the fastest takes {fastest:,.0f} s, the cheapest costs "
            f"{cheapest:,.2f} {found[0].currency or 'node hours'}; relax the deadline or the budget"
        )
    if goal.kind == "cost" or math.isfinite(goal.deadline_seconds):
        chosen = min(within, key=lambda one: (one.bill.middle, one.total.middle))
        if not math.isfinite(goal.deadline_seconds):
            return chosen, "least cost"
        sure = "" if chosen.training.high <= goal.deadline_seconds else " by the middle, not by the whole interval"
        return chosen, f"cheapest within {goal.deadline_seconds:,.0f} s{sure}"
    what = f"fastest for at most {goal.budget:,.2f}" if math.isfinite(goal.budget) else "least time"
    if within[0].training.middle > min(one.training.middle for one in within):
        what += "; the backend's own all-reduce, as the fastest is not 1 % better"
    return within[0], what


def _front(found: Sequence[Estimate]) -> list[Estimate]:
    """Those that no other beats in both time and node hours, fastest first."""
    front: list[Estimate] = []
    for one in sorted(found, key=lambda each: (each.total.middle, each.node_hours.middle)):
        if not front or one.node_hours.middle < front[-1].node_hours.middle * (1 - 1e-9):
            front.append(one)
    return front
