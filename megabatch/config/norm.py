"""Settings of batch-norm statistics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megabatch.config.section import Section

__all__ = ["NormConfig"]


class NormConfig(Section):
    """Batch-norm statistics used for evaluation.

    `momentum` is the weight of the newest step in the running average (PyTorch calls it momentum; Codreanu's
    moving-average fraction 0.95 is 0.05 here). With 1.0 there is no moving average: the statistics of the last
    step's ghost batches alone are averaged over all workers (Akiba 2017, section 2).
    `variance` "plain" averages the ghosts' variances as that paper does, "pooled" adds the variance of their means.
    `exact_batches` k above 0 measures the statistics anew before each evaluation and checkpoint, by forward passes
    over the k ghost batches that come next, instead of taking what training left behind.
    """

    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    variance: Literal["plain", "pooled"] = "plain"
    exact_batches: Annotated[int, Field(ge=0)] = 0
