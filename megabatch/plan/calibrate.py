"""Step time of a family of systems, fitted to rows: Bayesian linear regression with stated priors.

Published rows rarely determine the five parameters of a step (`step_fit`): two or three rows a family is usual. So
each parameter has a prior, as a part of T, the time the accelerator needs for 256 images, a step in which all but
the images is small:

    fixed 2.5 % +- 2.5 %      across 3 % +- 3 %      per_image T / 256 +- 100 %
    scatter * 256 * m(64) 3.5 % +- 3.5 %             jitter * m(64) 1 % +- 1 %

and every row counts with 3 % of its step, the lack of fit of a straight line through differently tuned systems; with
more where the rows at hand lie further off their line. Jitter is a judgement, because rows of at most 64 workers cannot
tell it from scatter (docs/results/planning.md); the other parts maximise the likelihood of such rows of MLPerf
(`python -m benchmarks.plan_priors`), rounded, and no larger system is in them. What the rows at hand say moves the
parameters away from there; what they do not say stays as uncertain as the prior, and the intervals show it. Rows of
other software stacks share one common factor each, of unknown size (see `interval.EVIDENCE`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megabatch.errors import DataError
from megabatch.plan.interval import EVIDENCE, FORM, combine
from megabatch.plan.rows import Row
from megabatch.plan.step_fit import PARAMETERS, StepFit, row_features
from megabatch.plan.straggler import expected_maximum

__all__ = ["PRIOR_PARTS", "fit_steps", "prior"]

PRIOR_PARTS = {"fixed": 0.025, "across": 0.03, "scatter": 0.035, "jitter": 0.01}
"""Of the time for 256 images; both the mean and the deviation."""

_EVALUATION_SECONDS = 0.5
"""A pass over 50,000 images takes a tenth of that; the rest is changing from one program to the other and back."""
_REFERENCE_WORKERS = 64
_REFERENCE_BATCH = 256

Array = np.ndarray[Any, np.dtype[np.float64]]


def fit_steps(rows: Sequence[Row], evidence: str = "same system") -> StepFit:
    """Fit the parameters to rows of one family.

    Raises:
        DataError: no rows.
    """
    if not rows:
        raise DataError("no calibration rows; give at least one row of the system")
    steps = np.array([row.step_seconds for row in rows])
    design = np.stack([row_features(row) for row in rows])
    mean, deviation = prior(rows)
    shared = _shared_factors(rows, design, steps, evidence) if evidence not in ("same system", "same stack") else None
    if shared is not None:
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
    kept = [math.sqrt(covariance[i, i]) / deviation[i] for i in range(count if logged else count - 1)]
    return StepFit(
        tuple(float(value) for value in parameters[:count]),
        covariance[:count, :count],
        tuple(rows),
        evidence,
        tuple(PARAMETERS[i] for i, part in enumerate(kept) if part > 0.8),
        lack_of_fit,
    )


def prior(rows: Sequence[Row], parts: Mapping[str, float] = PRIOR_PARTS) -> tuple[Array, Array]:
    """Mean and deviation of every parameter before the rows are looked at, but for the time of an image.

    Rows inside one node say nothing about the network: then `across` is twice as uncertain.
    """
    largest = max(row.local_batch for row in rows)
    per_image = float(np.mean([row.step_seconds / row.local_batch for row in rows if row.local_batch == largest]))
    whole = _REFERENCE_BATCH * per_image
    mean = np.array(
        [
            parts["fixed"] * whole,
            per_image,
            parts["across"] * whole,
            parts["scatter"] * per_image / expected_maximum(_REFERENCE_WORKERS),
            parts["jitter"] * whole / expected_maximum(_REFERENCE_WORKERS),
            _EVALUATION_SECONDS,
        ]
    )
    deviation = mean.copy()
    deviation[PARAMETERS.index("across")] *= 1 if any(row.num_nodes > 1 for row in rows) else 2
    return mean, deviation


def _shared_factors(rows: Sequence[Row], design: Array, steps: Array, evidence: str) -> Array:
    """A column for each software stack: its common factor multiplies what the parameters say.

    What was measured would not do in place of that: outliers would pull the parameters down.
    """
    mean, deviation = prior(rows)
    first, _ = _posterior(design, steps, combine(FORM, EVIDENCE[evidence]) * steps, mean, deviation)
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
