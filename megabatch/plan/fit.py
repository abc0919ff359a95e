"""The step time of a family of systems, fitted to rows of it: Bayesian linear regression with stated priors.

    step = fixed + per_image * b + across * [more than one node] + (scatter * b + jitter) * m(N)

`fixed` is what neither batch nor workers change (launches, optimizer), `across` what the first step beyond a node
costs (the part of the all-reduce that the backward pass does not hide). Every step waits for the slowest worker,
whose delay goes with m(N), the expected maximum: `scatter` of it is a part of what is computed (clocks, temperature,
images), `jitter` is not (operating system, deeper collectives). Logs that time blocks with an evaluation at the end
contain `evaluation` seconds more, spread over the steps of four epochs. None of the parameters can be negative.

Published rows rarely determine the five parameters: two or three rows a family is usual. So each parameter has a prior,
as a part of T, the time the accelerator needs for 256 images, a step in which all but the images is small:

    fixed 2.5 % +- 2.5 %      across 3 % +- 3 %      per_image T / 256 +- 100 %
    scatter * 256 * m(64) 3.5 % +- 3.5 %             jitter * m(64) 1 % +- 1 %

and every row counts with 3 % of its step, the lack of fit of a straight line through differently tuned systems; with
more where the rows at hand lie further off their line. Jitter is a judgement, because rows of at most 64 workers cannot
tell it from scatter (docs/results/planning.md); the other parts maximise the likelihood of such rows of MLPerf
(`python -m benchmarks.plan_priors`), rounded, and no larger system is in them. What the rows at hand say moves the
parameters away from there; what they do not say stays as uncertain as the prior, and the intervals show it. Rows of
other software stacks share one common factor each, of unknown size (see `quantity.EVIDENCE`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megabatch.errors import DataError
from megabatch.plan.compute import expected_maximum
from megabatch.plan.quantity import EVIDENCE, FORM, MAX_DEVIATION, Interval, Reach, interval
from megabatch.plan.rows import SystemRow

PARAMETERS = ("fixed", "per_image", "across", "scatter", "jitter", "evaluation")
PRIOR_PARTS = {"fixed": 0.025, "across": 0.03, "scatter": 0.035, "jitter": 0.01}
"""Of the time for 256 images; both the mean and the deviation."""

_IMAGES_BETWEEN_EVALUATIONS = 4 * 1_281_167
_EVALUATION_SECONDS = 0.5
"""A pass over 50,000 images takes a tenth of that; the rest is changing from one program to the other and back."""
_REFERENCE_WORKERS = 64
_REFERENCE_BATCH = 256

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class StepFit:
    """Fitted parameters with covariance, and where they come from.

    parameters: in the order of `PARAMETERS`, seconds; `scatter` per image, it and `jitter` per unit of m.
    lack_of_fit: relative deviation of the rows from their line, at least `FORM`.
    """

    parameters: tuple[float, ...]
    covariance: Array
    rows: tuple[SystemRow, ...]
    evidence: str
    undetermined: tuple[str, ...]
    lack_of_fit: float = FORM

    @property
    def deviations(self) -> tuple[float, ...]:
        """One standard deviation of each parameter."""
        return tuple(math.sqrt(max(0.0, float(value))) for value in np.diag(self.covariance))

    @property
    def logs_contain_evaluation(self) -> bool:
        """Whether any of the rows does."""
        return any(row.contains_evaluation for row in self.rows)

    def pass_seconds(self, ghost_batch_size: float) -> float:
        """What one worker computes for one ghost batch."""
        fixed, per_image, *_ = self.parameters
        return fixed + per_image * ghost_batch_size

    def parts(
        self, ghost_batch_size: float, world_size: int, num_nodes: int, passes: int, work: float = 1.0
    ) -> dict[str, float]:
        """Seconds of a step of `passes` ghost batches in turn, by part; without evaluation.

        work: multiply-adds of the network over those of the rows' network.
        """
        *_, across, scatter, jitter, _ = self.parameters
        return {
            "compute": work * passes * self.pass_seconds(ghost_batch_size),
            "exposed communication": across if num_nodes > 1 else 0.0,
            "stragglers": (work * scatter * passes * ghost_batch_size + jitter) * expected_maximum(world_size),
        }

    def changed(self, part: str, factor: float) -> StepFit:
        """The fit with "compute", "stragglers" or what is "exposed" `factor` times as long."""
        touched = {"compute": ("fixed", "per_image"), "stragglers": ("scatter", "jitter"), "exposed": ("across",)}[part]
        values = zip(PARAMETERS, self.parameters, strict=True)
        parameters = tuple(value * (factor if name in touched else 1.0) for name, value in values)
        return dataclasses.replace(self, parameters=parameters)

    def reach(self, local_batch: float, world_size: int, num_nodes: int) -> Reach:
        """How far from the calibrated rows."""
        batches = [row.local_batch for row in self.rows]
        most_workers = max(row.world_size for row in self.rows)
        return Reach(
            workers=max(0.0, math.log2(world_size / most_workers)),
            batch=max(0.0, math.log2(min(batches) / local_batch), math.log2(local_batch / max(batches))),
            evidence=self.evidence,
            first_time_across_nodes=num_nodes > 1 and all(row.num_nodes == 1 for row in self.rows),
            mixed_measurement=self.logs_contain_evaluation,
            lack_of_fit=self.lack_of_fit,
            known_workers=f"of the largest calibrated row ({most_workers:,})",
        )

    def deviation(
        self, local_batch: float, world_size: int, num_nodes: int, passes: int = 1, *, logged: bool = False
    ) -> float:
        """Relative standard deviation of a step of `passes` times `local_batch` images: parameters and form."""
        # Each pass has the fixed part and the images; the slowest worker's images add up, the rest comes once.
        times = np.array([passes, passes, 1, passes, 1, passes])
        features = _features(local_batch, world_size, num_nodes, logged) * times
        spread = math.sqrt(max(0.0, float(features @ self.covariance @ features)))
        middle = float(features @ np.array(self.parameters))
        return math.hypot(spread / middle, self.reach(local_batch, world_size, num_nodes).deviation)

    def predict(self, local_batch: float, world_size: int, num_nodes: int, *, logged: bool = False) -> Interval:
        """Step seconds with the 80 % interval; `logged`: with the evaluation that such a log would contain.

        Raises:
            DataError: the rows say so little that an answer would mean nothing.
        """
        middle = float(_features(local_batch, world_size, num_nodes, logged) @ np.array(self.parameters))
        deviation = self.deviation(local_batch, world_size, num_nodes, logged=logged)
        if not math.isfinite(middle) or middle <= 0 or deviation > MAX_DEVIATION:
            raise DataError(
                f"the {len(self.rows)} calibration rows cannot tell the step at local batch {local_batch:g} on "
                f"{world_size:,} workers (deviation {deviation:.0%}); add rows nearer to it"
            )
        return interval(middle, deviation)

    def warnings(self, local_batch: float, world_size: int, num_nodes: int) -> list[str]:
        """What widens the interval, for people."""
        found = self.reach(local_batch, world_size, num_nodes).warnings
        if self.undetermined:
            found.append(f"the rows do not determine {', '.join(self.undetermined)}: taken from the prior")
        return found


def fit_as_data(fit: StepFit) -> dict[str, Any]:
    """A fit for a program to read: seconds, one standard deviation each."""
    values = zip(PARAMETERS, fit.parameters, fit.deviations, strict=True)
    return {
        "parameters": {name: {"value": value, "deviation": deviation} for name, value, deviation in values},
        "undetermined": list(fit.undetermined),
        "num_rows": len(fit.rows),
        "evidence": fit.evidence,
        "lack_of_fit": fit.lack_of_fit,
    }


def row_features(row: SystemRow) -> Array:
    """What each parameter is multiplied with in a row's step."""
    return _features(row.local_batch, row.world_size, row.num_nodes, row.contains_evaluation)


def _features(local_batch: float, world_size: int, num_nodes: int, logs_contain_evaluation: bool) -> Array:
    evaluations = local_batch * world_size / _IMAGES_BETWEEN_EVALUATIONS if logs_contain_evaluation else 0.0
    slowest = expected_maximum(world_size)
    return np.array([1.0, local_batch, float(num_nodes > 1), local_batch * slowest, slowest, evaluations])


def fit_steps(rows: Sequence[SystemRow], evidence: str = "same system") -> StepFit:
    """Fit the parameters to rows of one family."""
    if not rows:
        raise DataError("no calibration rows; give at least one row of the system")
    steps = np.array([row.step_seconds for row in rows])
    design = np.stack([row_features(row) for row in rows])
    mean, deviation = prior(rows)
    if evidence not in ("same system", "same stack"):
        shared = _shared_factors(rows, design, steps, evidence)
        design = np.hstack([design, shared])
        mean = np.concatenate([mean, np.zeros(shared.shape[1])])
        deviation = np.concatenate([deviation, np.full(shared.shape[1], EVIDENCE[evidence])])
    parameters, covariance = _posterior(design, steps, FORM * steps, mean, deviation)
    residuals = (steps - design @ parameters) / steps
    # Rows far off their line are noisier than the form alone: they count less, and what they say is less certain.
    lack_of_fit = max(FORM, math.sqrt(float(residuals @ residuals) / max(1, len(rows) - 1)))
    if lack_of_fit > FORM:
        parameters, covariance = _posterior(design, steps, lack_of_fit * steps, mean, deviation)
    count = len(PARAMETERS)
    logged = any(row.contains_evaluation for row in rows)
    left = [math.sqrt(covariance[i, i]) / deviation[i] for i in range(count if logged else count - 1)]
    undetermined = tuple(PARAMETERS[i] for i, part in enumerate(left) if part > 0.8)
    values = tuple(float(value) for value in parameters[:count])
    return StepFit(values, covariance[:count, :count], tuple(rows), evidence, undetermined, lack_of_fit)


def prior(rows: Sequence[SystemRow], parts: Mapping[str, float] = PRIOR_PARTS) -> tuple[Array, Array]:
    """Mean and deviation of every parameter before the rows are looked at, but for the time of an image.

    Rows inside one node say nothing about the network: then `across` is twice as uncertain.
    """
    largest = max(row.local_batch for row in rows)
    per_image = float(np.mean([row.step_seconds / row.local_batch for row in rows if row.local_batch == largest]))
    whole = _REFERENCE_BATCH * per_image
    slowest = expected_maximum(_REFERENCE_WORKERS)
    scatter, jitter = parts["scatter"] * per_image / slowest, parts["jitter"] * whole / slowest
    mean = np.array([parts["fixed"] * whole, per_image, parts["across"] * whole, scatter, jitter, _EVALUATION_SECONDS])
    deviation = mean.copy()
    deviation[PARAMETERS.index("across")] *= 1 if any(row.num_nodes > 1 for row in rows) else 2
    return mean, deviation


def _shared_factors(rows: Sequence[SystemRow], design: Array, steps: Array, evidence: str) -> Array:
    """A column for each software stack: its common factor multiplies what the parameters say.

    What was measured would not do in place of that: outliers would pull the parameters down.
    """
    mean, deviation = prior(rows)
    first, _ = _posterior(design, steps, math.hypot(FORM, EVIDENCE[evidence]) * steps, mean, deviation)
    stacks = sorted({(row.family, row.stack) for row in rows})
    shared = np.zeros((len(rows), len(stacks)))
    for index, row in enumerate(rows):
        shared[index, stacks.index((row.family, row.stack))] = design[index] @ first
    return shared


def _posterior(design: Array, values: Array, noise: Array, mean: Array, deviation: Array) -> tuple[Array, Array]:
    """Mean and covariance of a linear model with Gaussian prior and noise; a parameter below 0 is held at 0."""
    free = np.ones(len(mean), dtype=bool)
    estimate = np.zeros(len(mean))
    covariance: Array = np.diag(deviation**2)
    for _ in range(len(PARAMETERS)):
        part = design[:, free] / noise[:, None]
        precision = part.T @ part + np.diag(deviation[free] ** -2.0)
        inverse: Array = np.linalg.inv(precision).astype(np.float64)
        right = part.T @ (values / noise) + mean[free] / deviation[free] ** 2
        estimate[:] = 0.0
        estimate[free] = inverse @ right
        if free.all():
            covariance = inverse
        negative = (estimate < 0) & (np.arange(len(mean)) < len(PARAMETERS))
        if not negative.any():
            break
        free &= ~negative
    return estimate, covariance
