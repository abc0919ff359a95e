"""Settings of batch-size control beyond the stages of `train.global_batch_size`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megabatch.config.section import NotNegative, Positive, PositiveInt, Section
from megabatch.errors import ConfigError
from megabatch.schedule.noise import NoiseRule


class AdaptiveConfig(Section):
    """Growth of the batch by the measured noise scale; see `megabatch.schedule.adaptive`.

    The batch begins with `train.global_batch_size`. It is multiplied by `growth` when the smoothed noise scale was at
    least `threshold` times the grown batch at `patience` measurements in a row. A decision takes effect `lead_steps`
    later, so that images can be prepared that far ahead.
    """

    max_global_batch_size: PositiveInt  # the batch grows no further
    growth: Annotated[float, Field(gt=1, le=16)] = 2.0  # the batch is multiplied by this
    threshold: Positive = 1.0  # noise scale over the grown batch that is wanted
    patience: PositiveInt = 10  # measurements in a row that must reach it
    from_epoch: NotNegative = 5.0  # not during warm-up
    lead_steps: PositiveInt = 8  # steps from a decision to its effect


class BatchControlConfig(Section):
    """What a change of the batch does, and how the noise scale is measured.

    `noise_rule` says what becomes of Smith's noise scale, lr * images / (global_batch_size * (1 - momentum)), when the
    batch is k times the first stage's. It "falls" by k, or an "lr" multiplied by k holds it, or a "momentum" of
    1 - (1 - momentum) / k does.
    """

    noise_rule: NoiseRule = "falls"  # what a change of the batch does to lr and momentum
    measure_every_steps: Annotated[int, Field(ge=0)] = 0  # 0: the gradient's noise scale is not measured
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.95  # weight of the past in its running averages
    adaptive: AdaptiveConfig | None = None

    @property
    def measures_noise(self) -> bool:
        return self.measure_every_steps > 0 or self.adaptive is not None

    def check_fits(self, first_global_batch_size: int, num_stages: int, ghost_batch_size: int) -> None:
        """Refuse a control that cannot work with the stages.

        Raises:
            ConfigError: what is given, what is needed, what to do.
        """
        if self.measures_noise and first_global_batch_size < 2 * ghost_batch_size:
            raise ConfigError(
                f"train.global_batch_size {first_global_batch_size} is one ghost batch of {ghost_batch_size}, and the "
                "noise scale is measured between ghost batches; give at least two"
            )
        if self.adaptive is None:
            return
        if num_stages > 1:
            raise ConfigError(
                f"train.global_batch_size has {num_stages} stages and batch_control.adaptive would change it too; "
                "give one batch to begin with, or leave adaptive out"
            )
        largest = self.adaptive.max_global_batch_size
        if largest < first_global_batch_size or largest % ghost_batch_size:
            raise ConfigError(
                f"batch_control.adaptive.max_global_batch_size {largest} must be a multiple of train.ghost_batch_size "
                f"{ghost_batch_size} and at least train.global_batch_size {first_global_batch_size}"
            )
