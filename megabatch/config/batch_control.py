"""Settings of batch-size control beyond the stages of `train.batch_total`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megabatch.config.section import NotNegative, PositiveInt, Section
from megabatch.errors import ConfigError
from megabatch.schedule.control import NoiseRule

__all__ = ["AdaptiveConfig", "BatchControlConfig"]


class AdaptiveConfig(Section):
    """Growth of the batch by the measured noise scale; see `megabatch.schedule.adaptive`.

    The batch begins with `train.batch_total` and is multiplied by `growth` when the smoothed noise scale was at least
    `threshold` times the grown batch at `patience` measurements in a row. A decision takes effect `lead_updates` later,
    so that pictures can be prepared that far ahead.
    """

    max_batch_total: PositiveInt
    growth: Annotated[float, Field(gt=1, le=16)] = 2.0
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    patience: PositiveInt = 10
    from_epoch: NotNegative = 5.0  # not during warm-up
    lead_updates: PositiveInt = 8


class BatchControlConfig(Section):
    """What a change of the batch does, and how the noise scale is measured.

    `noise` is what becomes of Smith's noise scale, rate * pictures / (batch_total * (1 - momentum)), when the batch is
    k times the first stage's: it "falls" by k, or is kept by a "rate" multiplied by k, or by a "momentum" of
    1 - (1 - momentum) / k.
    """

    noise: NoiseRule = "falls"
    measure_every_updates: Annotated[int, Field(ge=0)] = 0  # 0: the gradient's noise scale is not measured
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.95  # weight of the past in its running averages
    adaptive: AdaptiveConfig | None = None

    @property
    def measures_noise(self) -> bool:
        return self.measure_every_updates > 0 or self.adaptive is not None

    def check_fits(self, first_batch_total: int, num_stages: int, ghost_batch: int) -> None:
        """Refuse a control that cannot work with the stages.

        Raises:
            ConfigError: what is given, what is needed, what to do.
        """
        if self.measures_noise and first_batch_total < 2 * ghost_batch:
            raise ConfigError(
                f"train.batch_total {first_batch_total} is one ghost batch of {ghost_batch}, and the noise scale is "
                "measured between ghost batches; give at least two"
            )
        if self.adaptive is None:
            return
        if num_stages > 1:
            raise ConfigError(
                f"train.batch_total has {num_stages} stages and batch_control.adaptive would change it too; "
                "give one batch to begin with, or leave adaptive out"
            )
        largest = self.adaptive.max_batch_total
        if largest < first_batch_total or largest % ghost_batch:
            raise ConfigError(
                f"batch_control.adaptive.max_batch_total {largest} must be a multiple of train.ghost_batch "
                f"{ghost_batch} and at least train.batch_total {first_batch_total}"
            )
