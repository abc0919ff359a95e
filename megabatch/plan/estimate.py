"""What a training takes, by one class: `Estimator(cluster, workload, convergence, fit)` answers every question.

    training = first steps + sum over stages (steps x step) + evaluations + checkpoints and failures
    total    = initialisation + training

Initialisation is shown apart: it lies before the clock of the papers and of MLPerf, and inside the bill.
Checkpoints come at Young's and Daly's interval, sqrt(2 C M) - C for a checkpoint of C seconds and a mean time of M
seconds between failures of the allocation, when the cluster file knows the failures of its nodes.

What binds a plan is found by sensitivity: the same model is asked what would be saved if one thing were twice as good.
Whatever would save most is what binds. That is not always the largest part of a step: compute may take most of it
and yet, made faster, only uncover communication that it hides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from megabatch.plan.cluster import KNOBS, NETWORK_KNOBS, Cluster
from megabatch.plan.convergence import ConvergenceLaw, Epochs
from megabatch.plan.fit import StepFit
from megabatch.plan.quantity import MAX_DEVIATION, Interval, interval
from megabatch.plan.step import Candidate, Prices, StepModel, StepTime
from megabatch.plan.workload import Workload
from megabatch.schedule.batch import BatchStages

INITIALISATION = "initialisation"

_OTHER_TIMES = 0.5
"""Relative deviation of evaluations and failures."""
_YEAR_SECONDS = 365.25 * 86400
_LONGEST_SECONDS = 100 * _YEAR_SECONDS
_FEWEST_STEPS = 3
_BETTER = {
    "compute": (0.5, "compute", "compute twice as fast"),
    "worker link": (2.0, "links between the workers of a node", "twice the rate between workers of a node"),
    "NIC": (2.0, "NIC", "twice the NIC rate"),
    "rack uplink": (2.0, "rack uplinks", "twice the rack uplinks"),
    "wire latency": (0.5, "latency of the network", "half the wire latency"),
    "software latency": (0.5, "latency of the software", "half the software latency"),
    "stragglers": (0.5, "stragglers", "half the scatter of workers"),
    "loader": (2.0, "loader", "twice the loader rate"),
}


@dataclass(frozen=True)
class Estimate:
    """What a candidate would take. `step` and its parts are of the stage with most steps; intervals hold 80 %.

    time_parts: seconds by part, summing to `total.middle`. cost: None when the cluster has no price.
    warnings: what makes the intervals wide. notes: what else to know.
    """

    candidate: Candidate
    batch: str
    step: Interval
    step_time: StepTime
    images_per_second: Interval
    epochs: Interval
    steps: int
    time_parts: Mapping[str, float]
    training: Interval
    total: Interval
    node_hours: Interval
    cost: Interval | None
    currency: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def bill(self) -> Interval:
        """The cost, or the node hours where there is no price."""
        return self.cost or self.node_hours


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What one change would gain: part of the total time saved (negative: lost); `binding` is what it loosens."""

    what: str
    gain: float
    binding: str


class Estimator:
    """Step times, whole trainings and what binds them, with their uncertainty, for one recipe on one cluster.

    With a convergence law the epochs are those to its target, else the recipe's own. A fit to rows of systems replaces
    the cluster's step.
    """

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        convergence: ConvergenceLaw | None = None,
        fit: StepFit | None = None,
        *,
        prices: Prices | None = None,
    ) -> None:
        self.cluster, self.workload, self.convergence, self.fit = cluster, workload, convergence, fit
        self._prices = prices or Prices(cluster, workload.layers, workload.bytes_per_parameter)
        self.step = StepModel(self._prices, workload, fit)

    def at(self, workload: Workload) -> Estimator:
        """The same recipe at another global batch; prices already worked out are shared."""
        return Estimator(self.cluster, workload, self.convergence, self.fit, prices=self._prices)

    @cached_property
    def epochs(self) -> Epochs:
        """Epochs to the target of the law, without one the recipe's own."""
        law, load = self.convergence, self.workload
        if law is None:
            return Epochs(load.epochs, 0.0)
        return law.for_stages(load.stages_over(law.whole(load.stages, load.epochs)))

    @cached_property
    def steps_by_batch(self) -> list[tuple[int, int]]:
        """(global batch, steps) of every stage that makes any.

        Raises:
            ConfigError: hardly a step is made.
        """
        counts = [count for count in self.workload.steps_by_stage(self.epochs.epochs) if count[1]]
        num_steps = sum(number for _, number in counts)
        if num_steps < _FEWEST_STEPS:
            stages = self.workload.stages_over(self.epochs.epochs)
            raise ConfigError(
                f"{self.epochs.epochs:g} epochs of {self.workload.num_train:,} images make {num_steps} steps of "
                f"{stages}, which trains nothing; give more epochs or a smaller batch"
            )
        return counts

    def total_seconds(self, candidate: Candidate) -> float:
        """The middle of the total alone, for comparing many candidates."""
        return sum(self._time_parts(candidate, self._steps(candidate)).values())

    def estimate(self, candidate: Candidate) -> Estimate:
        """All about one candidate.

        Raises:
            ConfigError: the workers do not fit, or what comes out would mean nothing.
        """
        cluster, workers = self.cluster, candidate.workers
        cluster.check_holds(workers)
        candidate.grid.check_fits(workers)
        counts, steps, main_batch = self.steps_by_batch, self._steps(candidate), self._main_batch
        step = steps[main_batch]
        deviations = {batch: self.step.deviation(candidate, batch) for batch in steps}
        if deviations[main_batch] > MAX_DEVIATION:
            raise ConfigError(
                f"the step on {workers:,} workers would be uncertain by a factor of "
                f"{math.exp(1.28 * deviations[main_batch]):.1f} each way, which says nothing; calibrate nearer to it"
            )
        parts = self._time_parts(candidate, steps)
        in_clock = sum(seconds for name, seconds in parts.items() if name != INITIALISATION)
        total_seconds = in_clock + parts[INITIALISATION]
        if total_seconds > _LONGEST_SECONDS:
            raise ConfigError(
                f"training on {workers:,} workers would take {total_seconds / _YEAR_SECONDS:,.3g} years; check "
                f"the numbers of '{cluster.name}' and the recipe's epochs"
            )
        # Stages are wrong together, if they are: their deviations add as they are, not in squares.
        of_steps = sum(number * steps[batch].seconds * deviations[batch] for batch, number in counts) / parts["steps"]
        clock_deviation = self._clock_deviation(parts, in_clock, of_steps)
        total_deviation = math.hypot(
            in_clock / total_seconds * clock_deviation,
            parts[INITIALISATION] / total_seconds * cluster.initialisation_seconds.relative_deviation,
        )
        total, one_step = interval(total_seconds, total_deviation), interval(step.seconds, deviations[main_batch])
        nodes, price = cluster.nodes_of(workers), cluster.price_per_node_hour
        hours = total_seconds * nodes / 3600
        cost = interval(hours * price.value, math.hypot(total_deviation, price.relative_deviation)) if price else None
        images_per_second = Interval(*(main_batch / one for one in (one_step.middle, one_step.high, one_step.low)))
        warnings = [text for batch, _ in counts for text in self.step.warnings(candidate, batch)]
        notes = [text for batch, _ in counts for text in self.step.notes(candidate, batch)]
        return Estimate(
            candidate=candidate,
            batch=str(self.workload.stages_over(self.epochs.epochs)),
            step=one_step,
            step_time=step,
            images_per_second=images_per_second,
            epochs=interval(self.epochs.epochs, self.epochs.deviation),
            steps=sum(number for _, number in counts),
            time_parts=parts,
            training=interval(in_clock, clock_deviation),
            total=total,
            node_hours=total.times(nodes / 3600),
            cost=cost,
            currency=cluster.currency,
            warnings=tuple(dict.fromkeys([*warnings, *self.epochs.warnings])),
            notes=tuple(dict.fromkeys([*self.workload.notes, *notes])),
        )

    def _clock_deviation(self, parts: Mapping[str, float], in_clock: float, of_steps: float) -> float:
        """Relative deviation of the training, whose parts are uncertain independently of one another."""
        cluster = self.cluster
        of_failures = cluster.node_mtbf_seconds.relative_deviation if cluster.node_mtbf_seconds else 0.0
        of_parts = {
            "steps": math.hypot(of_steps, self.epochs.deviation),
            "first steps": cluster.first_steps_seconds.relative_deviation,
            "evaluation": _OTHER_TIMES,
            "failures": math.hypot(_OTHER_TIMES, of_failures),
        }
        return math.hypot(*(parts[name] / in_clock * one for name, one in of_parts.items()))

    def failure_seconds(self, num_nodes: int, run_seconds: float) -> float:
        """Seconds lost to checkpoints, repeated work and restarts; 0 when the cluster's failures are not known."""
        cluster = self.cluster
        if cluster.node_mtbf_seconds is None:
            return 0.0
        between = cluster.node_mtbf_seconds.value / num_nodes
        write, restart = cluster.checkpoint_seconds.value, cluster.restart_seconds.value
        every = math.sqrt(2 * write * between) - write
        if every <= write:
            raise ConfigError(
                f"{num_nodes:,} nodes of '{cluster.name}' fail every {between:.0f} s, hardly longer than the "
                f"{write:.0f} s of a checkpoint: no progress is possible; use fewer nodes or faster checkpoints"
            )
        writes = write * max(0.0, math.ceil(run_seconds / every) - 1)
        return writes + run_seconds / between * (min(every, run_seconds) / 2 + restart)

    def sensitivity(self, chosen: Estimate) -> list[Sensitivity]:
        """What the chosen plan would gain by each change, most first; without a law a larger batch is not judged."""
        now, law, candidate = chosen.total.middle, self.convergence, chosen.candidate
        found = []
        for knob in KNOBS:
            better, binding, what = _BETTER[knob]
            then = self._changed(knob, better, candidate.workers).total_seconds(candidate)
            found.append(Sensitivity(what, 1 - then / now, binding))
        if law is not None:
            stages = self.workload.stages_over(chosen.epochs.middle)
            doubled = BatchStages(stages.from_epochs, tuple(2 * total for total in stages.global_batch_sizes))
            then = self.at(self.workload.with_batch(doubled)).total_seconds(candidate)
            found.append(Sensitivity("twice the global batch", 1 - then / now, "global batch"))
            spared = (1 - law.floor_epochs / chosen.epochs.middle) * (chosen.time_parts["steps"] / now)
            found.append(Sensitivity("as few epochs as a small batch needs", spared, "convergence at this batch"))
        start = 0.5 * chosen.time_parts[INITIALISATION] / now
        found.append(Sensitivity("half the initialisation", start, INITIALISATION))
        return sorted(found, key=lambda one: -one.gain)

    def _changed(self, knob: str, factor: float, workers: int) -> Estimator:
        """On the cluster with one thing `factor` times as large; a fit changes with it."""
        cluster, fit = self.cluster.changed(knob, factor), self.fit
        if fit is not None and knob in NETWORK_KNOBS:
            # What a fit counts as exposed goes with the price of the backend's own all-reduce.
            shape, size = GridShape((1, workers)), self.workload.gradient_bytes
            before, after = (one.all_reduce("backend", shape, size).seconds for one in (self.cluster, cluster))
            fit = fit.changed("exposed", after / before if workers > 1 else 1.0)
        elif fit is not None and knob in ("compute", "stragglers"):
            fit = fit.changed(knob, factor)
        return Estimator(cluster, self.workload, self.convergence, fit)

    @property
    def _main_batch(self) -> int:
        """The global batch of the stage with most steps."""
        return max(self.steps_by_batch, key=lambda count: count[1])[0]

    def _steps(self, candidate: Candidate) -> dict[int, StepTime]:
        return {batch: self.step.time(candidate, batch) for batch, _ in self.steps_by_batch}

    def _time_parts(self, candidate: Candidate, step_times: Mapping[int, StepTime]) -> dict[str, float]:
        cluster, workload = self.cluster, self.workload
        steps = sum(number * step_times[batch].seconds for batch, number in self.steps_by_batch)
        num_evaluations = max(1, math.floor(self.epochs.epochs / workload.evaluate_every_epochs + 1e-9))
        main = step_times[self._main_batch]
        forward = (1 - cluster.compute.backward_share) * main.parts["compute"] / main.local_batch
        evaluation = num_evaluations * math.ceil(workload.num_val / candidate.workers) * forward
        return {
            INITIALISATION: cluster.initialisation_seconds.value,
            "first steps": cluster.first_steps_seconds.value,
            "steps": steps,
            "evaluation": evaluation,
            "failures": self.failure_seconds(cluster.nodes_of(candidate.workers), steps + evaluation),
        }
