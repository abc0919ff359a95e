"""Plans: the best of every number of workers and total batch, and the choice for least time, least cost, a deadline or
a budget.

Every combination is priced by its middle (`search`); the best of each number of workers and batch gets the full
prediction. The Pareto front holds what nothing else beats in both time and cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.errors import ConfigError, MegabatchError
from megabatch.machine import usable_cores
from megabatch.plan.cluster import Cluster
from megabatch.plan.convergence import ConvergenceLaw
from megabatch.plan.helps import INITIALISATION, Help, what_would_help
from megabatch.plan.predict import Prediction, predict
from megabatch.plan.search import DRAW, Space, best_batch, best_candidates
from megabatch.plan.step import Candidate
from megabatch.plan.step_fit import StepFit
from megabatch.plan.workload import Workload
from megabatch.schedule.batch import BatchStages

__all__ = ["Goal", "PlanResult", "plan", "worker_counts"]

_LARGEST_SEARCH = 4096
_NO_GAIN = 1e-6


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

    load: the workload at the total batch of the choice. binding: what would save most if it were better. left_out:
    numbers of workers, or batches, that were asked for and cannot be, each with its reason.
    """

    chosen: Prediction
    load: Workload
    candidates: tuple[Prediction, ...]
    front: tuple[Prediction, ...]
    helps: tuple[Help, ...]
    num_considered: int
    reason: str
    left_out: tuple[str, ...] = ()

    @property
    def binding(self) -> str:
        """What binds the whole, and what the training by itself where that is something else."""
        helps = [one.binding for one in self.helps if one.gain > _NO_GAIN] or [self.chosen.largest_part]
        if helps[0] != INITIALISATION:
            return helps[0]
        return f"{INITIALISATION} (the training itself by {helps[1] if len(helps) > 1 else self.chosen.largest_part})"


def plan(
    cluster: Cluster,
    workload: Workload,
    workers: Sequence[int],
    goal: Goal,
    *,
    batches: Sequence[BatchStages] = (),
    space: Space | None = None,
    law: ConvergenceLaw | None = None,
    fit: StepFit | None = None,
) -> PlanResult:
    """Search and choose. Without `batches` the recipe's own is tried, and with a law others beside it.

    With a law the recipe's own stages are stretched to the epochs that the target takes; `batches` are taken as given.

    Raises:
        ConfigError: nothing fits, with the reason of the last refusal; or the goal cannot be met, with the nearest.
    """
    space = space or Space()
    found: list[tuple[Prediction, Workload]] = []
    considered = 0
    left_out: dict[str, str] = {}
    for count in workers:
        loads = [workload.with_batch(stages) for stages in batches] or [workload]
        best: list[Candidate] = []
        for load in loads:
            what = f"{count:,} workers" + (f", batch {load.stages}" if len(loads) > 1 else "")
            try:
                cluster.check_holds(count)
                best, tried = best_candidates(cluster, load, count, space, law, fit)
                considered += tried
            except MegabatchError as error:
                left_out[what] = str(error)
                continue
            for one in best:
                _predict_into(found, left_out, cluster, load, one, law, fit)
        if law is not None and not batches and count <= cluster.max_workers:
            try:
                load, tried = best_batch(cluster, workload, count, best, space, law, fit)
                considered += tried
                if load is not workload:
                    again, tried = best_candidates(cluster, load, count, space, law, fit)
                    considered += tried
                    for one in again:
                        _predict_into(found, left_out, cluster, load, one, law, fit)
            except MegabatchError as error:
                left_out[f"{count:,} workers"] = str(error)
    if not found:
        raise ConfigError(list(left_out.values())[-1] if left_out else "nothing to try; name workers")
    found.sort(key=lambda one: one[0].training.middle / (DRAW if one[0].candidate.algorithm == "backend" else 1.0))
    predictions = [one for one, _ in found]
    chosen, reason = _choose(predictions, goal)
    load = next(load for one, load in found if one is chosen)
    helps = what_would_help(cluster, load, chosen, law, fit)
    served = {f"{one.candidate.workers:,} workers" for one in predictions}
    return PlanResult(
        chosen,
        load,
        tuple(predictions),
        tuple(_front(predictions)),
        tuple(helps),
        considered,
        reason,
        tuple(f"{what}: {why}" for what, why in left_out.items() if what not in served),
    )


def _predict_into(
    found: list[tuple[Prediction, Workload]],
    left_out: dict[str, str],
    cluster: Cluster,
    load: Workload,
    candidate: Candidate,
    law: ConvergenceLaw | None,
    fit: StepFit | None,
) -> None:
    """One more prediction, or the reason why there is none: an algorithm that cannot be told leaves the others."""
    try:
        found.append((predict(cluster, load, candidate, law=law, fit=fit), load))
    except MegabatchError as error:
        left_out[f"{candidate.workers:,} workers, {candidate.algorithm}"] = str(error)


def worker_counts(cluster: Cluster, text: str | None) -> list[int]:
    """Read "1024", "256,1024" or "64..4096" (doubling).

    Without it: the measured world where links were measured, else doubling from one node to all of the cluster; on
    the machine at hand from one worker to its cores.
    """
    if text is None:
        if cluster.calibration is not None:
            return [cluster.calibration.shape.world_size]
        if cluster.measured_here:
            return _doubling(1, cluster.measured_workers or usable_cores())
        return _doubling(cluster.workers_per_node, int(min(cluster.max_workers, _LARGEST_SEARCH)))
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
    return list(dict.fromkeys(counts))


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
        chosen = min(within, key=lambda one: (bill(one), one.total.middle))
        if not math.isfinite(goal.deadline_seconds):
            return chosen, "least cost"
        sure = "" if chosen.training.high <= goal.deadline_seconds else " by the middle, not by the whole interval"
        return chosen, f"cheapest within {goal.deadline_seconds:,.0f} s{sure}"
    what = f"fastest for at most {goal.budget:,.2f}" if math.isfinite(goal.budget) else "least time"
    if within[0].training.middle > min(one.training.middle for one in within):
        what += "; the backend's own all-reduce, as the fastest is not 1 % better"
    return within[0], what


def _front(found: Sequence[Prediction]) -> list[Prediction]:
    """Those that no other beats in both time and node hours, fastest first."""
    front: list[Prediction] = []
    for one in sorted(found, key=lambda each: (each.total.middle, each.node_hours.middle)):
        if not front or one.node_hours.middle < front[-1].node_hours.middle * (1 - 1e-9):
            front.append(one)
    return front


def _doubling(low: int, high: int) -> list[int]:
    counts = [low]
    while counts[-1] * 2 < high:
        counts.append(counts[-1] * 2)
    return [*counts, high] if high > counts[-1] else counts
