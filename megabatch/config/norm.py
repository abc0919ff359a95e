"""Settings of batch-norm statistics."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megabatch.config.section import Section

__all__ = ["NormConfig"]


class NormConfig(Section):
    """Batch-norm statistics used for evaluation.

    `newest_share` is the weight of the newest update in the running average (PyTorch calls it momentum; Codreanu's
    moving-average fraction 0.95 is 0.05 here). With 1.0 there is no moving average: the statistics of the last
    update's ghost batches alone are averaged over all workers (Akiba 2017, section 2).
    """

    newest_share: Annotated[float, Field(gt=0, le=1)] = 0.1
