"""Time and cost of a whole training: initialisation, first steps, steps, evaluations, checkpoints and
failures.

    time = initialisation + first steps + sum over stages (steps x step) + evaluations + checkpoints and failures

Initialisation is shown apart: it lies before the clock of the papers and of MLPerf, and inside the bill.
Checkpoints come at Young's and Daly's interval, sqrt(2 C M) - C for a checkpoint of C seconds and a mean time of M
seconds between failures of the allocation, when the cluster file knows the failures of its nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megabatch.errors import ConfigError
from megabatch.plan.cluster import Cluster
from megabatch.plan.convergence import ConvergenceLaw, Epochs
from megabatch.plan.interval import MAX_DEVIATION, Interval, combine, interval
from megabatch.plan.step import Candidate, StepTime, step_deviation, step_notes, step_time, step_warnings
from megabatch.plan.step_fit import StepFit
from megabatch.plan.workload import Workload

__all__ = ["Prediction", "expected_seconds", "failure_seconds", "predict"]

_OTHER_TIMES = 0.5
"""Relative deviation of evaluations and failures."""
_YEAR_SECONDS = 365.25 * 86400
_LONGEST_SECONDS = 100 * _YEAR_SECONDS
_FEWEST_STEPS = 3


@dataclass(frozen=True)
class Prediction:
    """What a candidate would take. `step` is of the stage with most steps; intervals hold 80 %.

    time_parts: seconds by part, summing to `total.middle`. cost is None when the cluster has no price.
    warnings: what makes the intervals wide. notes: what else to know.
    """

    candidate: Candidate
    batch: str
    step: Interval
    step_parts: Mapping[str, float]
    communication_seconds: float
    local_batch: float
    ghost_batch_size: int
    images_per_second: Interval
    efficiency: float
    epochs: Interval
    steps: int
    time_parts: Mapping[str, float]
    training: Interval
    total: Interval
    node_hours: Interval
    cost: Interval | None
    currency: str
    largest_part: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()


def predict(
    cluster: Cluster,
    workload: Workload,
    candidate: Candidate,
    *,
    law: ConvergenceLaw | None = None,
    fit: StepFit | None = None,
) -> Prediction:
    """Predict one candidate; with a `law` the epochs are those to its target, else the recipe's own.

    Raises:
        ConfigError: the workers do not fit, or what comes out would mean nothing.
    """
    cluster.check_holds(candidate.workers)
    candidate.grid.check_fits(candidate.workers)
    epochs = _epochs(workload, law)
    counts = _counts(workload, epochs.epochs)
    steps = {batch: step_time(cluster, workload, candidate, batch, fit) for batch, _ in counts}
    main_batch = max(counts, key=lambda count: count[1])[0]
    step = steps[main_batch]
    deviations = {batch: step_deviation(cluster, workload, candidate, batch, fit) for batch, _ in counts}
    deviation = deviations[main_batch]
    if deviation > MAX_DEVIATION:
        raise ConfigError(
            f"the step on {candidate.workers:,} workers would be uncertain by a factor of "
            f"{math.exp(1.28 * deviation):.1f} each way, which says nothing; calibrate nearer to it"
        )
    parts = _time_parts(cluster, workload, candidate, epochs.epochs, counts, steps)
    in_clock = sum(seconds for name, seconds in parts.items() if name != "initialisation")
    # Stages are wrong together, if they are: their deviations add as they are, not in squares.
    of_steps = sum(number * steps[batch].seconds * deviations[batch] for batch, number in counts) / parts["steps"]
    of_failures = cluster.node_mtbf_seconds.relative_deviation if cluster.node_mtbf_seconds else 0.0
    clock_deviation = combine(
        parts["steps"] / in_clock * combine(of_steps, epochs.deviation),
        parts["first steps"] / in_clock * cluster.first_steps_seconds.relative_deviation,
        parts["evaluation"] / in_clock * _OTHER_TIMES,
        parts["failures"] / in_clock * combine(_OTHER_TIMES, of_failures),
    )
    total_seconds = in_clock + parts["initialisation"]
    if total_seconds > _LONGEST_SECONDS:
        raise ConfigError(
            f"training on {candidate.workers:,} workers would take {total_seconds / _YEAR_SECONDS:,.3g} years; check "
            f"the numbers of '{cluster.name}' and the recipe's epochs"
        )
    initialisation = cluster.initialisation_seconds.relative_deviation
    total_deviation = combine(
        in_clock / total_seconds * clock_deviation, parts["initialisation"] / total_seconds * initialisation
    )
    total = interval(total_seconds, total_deviation)
    nodes = cluster.nodes_of(candidate.workers)
    price, hours = cluster.price_per_node_hour, total_seconds * nodes / 3600
    cost = interval(hours * price.value, combine(total_deviation, price.relative_deviation)) if price else None
    warnings = [text for batch, _ in counts for text in step_warnings(cluster, workload, candidate, batch, fit)]
    notes = [text for batch, _ in counts for text in step_notes(cluster, workload, candidate, batch)]
    one_step = interval(step.seconds, deviation)
    return Prediction(
        candidate=candidate,
        batch=str(workload.stages_over(epochs.epochs)),
        step=one_step,
        step_parts=step.parts,
        communication_seconds=step.communication_seconds,
        local_batch=step.local_batch,
        ghost_batch_size=step.ghost_batch_size,
        images_per_second=Interval(main_batch / one_step.middle, main_batch / one_step.high, main_batch / one_step.low),
        efficiency=step.efficiency,
        epochs=interval(epochs.epochs, epochs.deviation),
        steps=sum(number for _, number in counts),
        time_parts=parts,
        training=interval(in_clock, clock_deviation),
        total=total,
        node_hours=total.times(nodes / 3600),
        cost=cost,
        currency=cluster.currency,
        largest_part=step.largest_part,
        warnings=tuple(dict.fromkeys([*warnings, *epochs.warnings])),
        notes=tuple(dict.fromkeys([*workload.notes, *notes])),
    )


def expected_seconds(
    cluster: Cluster,
    workload: Workload,
    candidate: Candidate,
    law: ConvergenceLaw | None = None,
    fit: StepFit | None = None,
) -> float:
    """The middle of the total alone, for comparing many candidates."""
    epochs = _epochs(workload, law).epochs
    counts = _counts(workload, epochs)
    steps = {batch: step_time(cluster, workload, candidate, batch, fit) for batch, _ in counts}
    return sum(_time_parts(cluster, workload, candidate, epochs, counts, steps).values())


def failure_seconds(cluster: Cluster, num_nodes: int, run_seconds: float) -> float:
    """Seconds lost to checkpoints, repeated work and restarts; 0 when the cluster's failures are not known."""
    if cluster.node_mtbf_seconds is None:
        return 0.0
    between = cluster.node_mtbf_seconds.value / num_nodes
    write, restart = cluster.checkpoint_seconds.value, cluster.restart_seconds.value
    every = math.sqrt(2 * write * between) - write
    if every <= write:
        raise ConfigError(
            f"{num_nodes:,} nodes of '{cluster.name}' fail every {between:.0f} s, hardly longer than the {write:.0f} s "
            "of a checkpoint: no progress is possible; use fewer nodes or faster checkpoints"
        )
    length = min(every, run_seconds)
    writes = write * max(0.0, math.ceil(run_seconds / every) - 1)
    return writes + run_seconds / between * (length / 2 + restart)


def _epochs(workload: Workload, law: ConvergenceLaw | None) -> Epochs:
    """Epochs to the target of the law, without one the recipe's own."""
    if law is None:
        return Epochs(workload.epochs, 0.0)
    length = workload.epochs if workload.fixed_stages else law.whole(workload.stages, workload.epochs)
    return law.for_stages(workload.stages_over(length))


def _counts(workload: Workload, epochs: float) -> list[tuple[int, int]]:
    """(total batch, steps) of every stage that makes any.

    Raises:
        ConfigError: hardly a step is made.
    """
    counts = [count for count in workload.steps_by_stage(epochs) if count[1]]
    num_steps = sum(number for _, number in counts)
    if num_steps < _FEWEST_STEPS:
        raise ConfigError(
            f"{epochs:g} epochs of {workload.num_train:,} images make {num_steps} steps of {workload.stages}, "
            "which trains nothing; give more epochs or a smaller batch"
        )
    return counts


def _time_parts(
    cluster: Cluster,
    workload: Workload,
    candidate: Candidate,
    epochs: float,
    counts: list[tuple[int, int]],
    step_times: Mapping[int, StepTime],
) -> dict[str, float]:
    steps = sum(number * step_times[batch].seconds for batch, number in counts)
    num_evaluations = max(1, math.floor(epochs / workload.evaluate_every_epochs + 1e-9))
    main = step_times[max(counts, key=lambda count: count[1])[0]]
    forward = (1 - cluster.compute.backward_share) * main.parts["compute"] / main.local_batch
    evaluation = num_evaluations * math.ceil(workload.num_val / candidate.workers) * forward
    nodes = cluster.nodes_of(candidate.workers)
    return {
        "initialisation": cluster.initialisation_seconds.value,
        "first steps": cluster.first_steps_seconds.value,
        "steps": steps,
        "evaluation": evaluation,
        "failures": failure_seconds(cluster, nodes, steps + evaluation),
    }
