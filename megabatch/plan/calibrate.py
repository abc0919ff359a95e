"""Step time of a family of systems, fitted to rows: Bayesian linear regression with stated priors.

    step = fixed + per_picture * b + across * [more than one node] + per_worker * m(N)

`fixed` is what neither batch nor workers change (launches, optimiser), `across` what the first step beyond a node
costs (the part of the all-reduce that the backward pass does not hide), `per_worker` what grows with the workers
whatever the batch: stragglers, for which m(N), the expected maximum, is the law, and the latency of deeper
collectives, whose logarithm it resembles. None of them can be negative.

Published rows rarely determine four parameters: two or three rows a family is usual. So each parameter has a prior,
as a part of T, the time the accelerator needs for 256 pictures, a step in which all but the pictures is small:

    fixed 2 % +- 2 %      across 1.5 % +- 1.5 %      per_worker * m(64) 2 % +- 2 %      per_picture T / 256 +- 100 %

and every row counts with 3 % of its step, the lack of fit of a straight line through differently tuned systems.
What the rows say moves the parameters away from there; what they do not say stays as uncertain as the prior, and
the intervals show it. Rows of other software stacks share one common factor each, of unknown size (see
`interval.EVIDENCE`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megabatch.errors import DataError
from megabatch.plan.interval import EVIDENCE, FORM, Interval, Reach, combine, interval, reach_deviation, reach_warnings
from megabatch.plan.rows import Row
from megabatch.plan.straggler import expected_maximum

__all__ = ["PARAMETERS", "StepFit", "choose_evidence", "fit_steps", "generation"]

PARAMETERS = ("fixed", "per_picture", "across", "per_worker")

_PRIOR_PARTS = {"fixed": 0.02, "across": 0.015, "per_worker": 0.02}
_REFERENCE_WORKERS = 64
_REFERENCE_BATCH = 256
_TOO_UNCERTAIN = 0.7

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class StepFit:
    """Fitted parameters with covariance (seconds; `per_worker` per unit of m), and where they come from."""

    parameters: tuple[float, ...]
    covariance: Array
    rows: tuple[Row, ...]
    evidence: str
    undetermined: tuple[str, ...]

    def seconds(self, local_batch: float, num_workers: int, num_nodes: int) -> float:
        """The middle of the prediction."""
        return float(_features(local_batch, num_workers, num_nodes) @ np.array(self.parameters))

    def reach(self, local_batch: float, num_workers: int, num_nodes: int) -> Reach:
        """How far from the calibrated rows."""
        batches = [row.local_batch for row in self.rows]
        most_workers = max(row.num_workers for row in self.rows)
        return Reach(
            workers=max(0.0, math.log2(num_workers / most_workers)),
            batch=max(0.0, math.log2(min(batches) / local_batch), math.log2(local_batch / max(batches))),
            evidence=self.evidence,
            first_time_across_nodes=num_nodes > 1 and all(row.num_nodes == 1 for row in self.rows),
            mixed_measurement=any(row.contains_evaluation for row in self.rows),
        )

    def deviation(self, local_batch: float, num_workers: int, num_nodes: int) -> float:
        """Relative standard deviation of a prediction: parameters and form."""
        features = _features(local_batch, num_workers, num_nodes)
        spread = math.sqrt(max(0.0, float(features @ self.covariance @ features)))
        middle = self.seconds(local_batch, num_workers, num_nodes)
        return combine(spread / middle, reach_deviation(self.reach(local_batch, num_workers, num_nodes)))

    def predict(self, local_batch: float, num_workers: int, num_nodes: int) -> Interval:
        """Step seconds with the 80 % interval.

        Raises:
            DataError: the rows say so little that an answer would mean nothing.
        """
        middle = self.seconds(local_batch, num_workers, num_nodes)
        deviation = self.deviation(local_batch, num_workers, num_nodes)
        if not math.isfinite(middle) or middle <= 0 or deviation > _TOO_UNCERTAIN:
            raise DataError(
                f"the {len(self.rows)} calibration rows cannot tell the step at local batch {local_batch:g} on "
                f"{num_workers:,} workers (deviation {deviation:.0%}); add rows nearer to it"
            )
        return interval(middle, deviation)

    def warnings(self, local_batch: float, num_workers: int, num_nodes: int) -> list[str]:
        """What widens the interval, for people."""
        found = reach_warnings(self.reach(local_batch, num_workers, num_nodes))
        if self.undetermined:
            found.append(f"the rows do not determine {', '.join(self.undetermined)}: taken from the prior")
        return found


def choose_evidence(
    rows: Sequence[Row], family: str, stack: str, accelerator: str, chassis: str
) -> tuple[list[Row], str]:
    """The rows to calibrate on, and a key of `EVIDENCE`: of the same family and stack, else other stacks or systems.

    Raises:
        DataError: nothing with this accelerator.
    """
    same_family = [row for row in rows if row.family == family]
    same_stack = [row for row in same_family if row.stack == stack]
    if same_stack:
        return same_stack, "same system" if any(row.chassis == chassis for row in same_stack) else "same stack"
    same_framework = [row for row in same_family if row.framework == _framework_of(stack)]
    if same_framework:
        return same_framework, "other stack"
    if same_family:
        return same_family, "other framework"
    relatives = [row for row in rows if row.accelerator == accelerator]
    relatives = relatives or [row for row in rows if generation(row.accelerator) == generation(accelerator)]
    if relatives:
        return relatives, "other system"
    raise DataError(f"no calibration row has the accelerator '{accelerator}'; add one, or measure a node")


def fit_steps(rows: Sequence[Row], evidence: str = "same system") -> StepFit:
    """Fit the parameters to rows of one family.

    Raises:
        DataError: no rows.
    """
    if not rows:
        raise DataError("no calibration rows; give at least one row of the system")
    steps = np.array([row.step_seconds for row in rows])
    design = np.stack([_features(row.local_batch, row.num_workers, row.num_nodes) for row in rows])
    groups = sorted({_group(row) for row in rows}) if evidence not in ("same system", "same stack") else []
    mean, deviation = _prior(rows)
    shared = np.zeros((len(rows), len(groups)))
    if groups:
        # A group's factor multiplies what the parameters say, not what was measured: outliers would pull them down.
        first, _ = _posterior(design, steps, combine(FORM, EVIDENCE[evidence]) * steps, mean, deviation)
        for index, row in enumerate(rows):
            shared[index, groups.index(_group(row))] = design[index] @ first
    mean = np.concatenate([mean, np.zeros(len(groups))])
    deviation = np.concatenate([deviation, np.full(len(groups), EVIDENCE[evidence])])
    parameters, covariance = _posterior(np.hstack([design, shared]), steps, FORM * steps, mean, deviation)
    count = len(PARAMETERS)
    kept = [math.sqrt(covariance[i, i]) / deviation[i] for i in range(count)]
    undetermined = tuple(name for name, part in zip(PARAMETERS, kept, strict=True) if part > 0.8)
    return StepFit(
        tuple(float(value) for value in parameters[:count]),
        covariance[:count, :count],
        tuple(rows),
        evidence,
        undetermined,
    )


def _features(local_batch: float, num_workers: int, num_nodes: int) -> Array:
    return np.array([1.0, local_batch, 1.0 if num_nodes > 1 else 0.0, expected_maximum(num_workers)])


def _prior(rows: Sequence[Row]) -> tuple[Array, Array]:
    largest = max(row.local_batch for row in rows)
    per_picture = float(np.mean([row.step_seconds / row.local_batch for row in rows if row.local_batch == largest]))
    whole = _REFERENCE_BATCH * per_picture
    mean = np.array(
        [
            _PRIOR_PARTS["fixed"] * whole,
            per_picture,
            _PRIOR_PARTS["across"] * whole,
            _PRIOR_PARTS["per_worker"] * whole / expected_maximum(_REFERENCE_WORKERS),
        ]
    )
    return mean, mean.copy()


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


def _framework_of(stack: str) -> str:
    return stack.split(" ")[1] if " " in stack else ""


def _group(row: Row) -> str:
    return f"{row.family}|{row.stack}"


def generation(accelerator: str) -> str:
    """The accelerator without memory size and board: "a100", "tpu-v4", "ascend910"."""
    name = {"dgx1": "v100", "dgx2": "v100", "dgx2h": "v100", "dgxa100": "a100", "dgxh100": "h100"}.get(accelerator)
    found = re.match(r"tpu-v\d+|[a-z]+-?\d+", accelerator)
    return name or (
        found[0] if found and found[0].startswith("tpu") else found[0].replace("-", "") if found else accelerator
    )
