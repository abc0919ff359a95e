"""Settings of the optimizer and of its scheduled values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megabatch.config.section import NotNegative, Positive, Section
from megabatch.schedule.pieces import Scheduled, check_pieces, largest_value, value_at


class LarsConfig(Section):
    """Layer-wise rates, for `optimizer.name = "lars"`; `megabatch.optim.lars` says what the rules are."""

    rule: Literal["paper", "trust_inside", "trust_outside"] = "paper"  # where the trust ratio enters
    trust_coefficient: Positive = 0.001  # the paper's eta
    eps: NotNegative = 0.0  # added to the denominator of the trust ratio
    clip: bool = False  # a layer's own lr never exceeds `lr`


class RmspropWarmupConfig(Section):
    """RMSprop at first, SGD later, for `optimizer.name = "rmsprop_warmup"` (Akiba 2017, section 3.1)."""

    lr: NotNegative = 3e-4  # of the RMSprop part
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.99  # share of the past in the mean of squared gradients
    eps: Positive = 1e-8  # added to the root of that mean
    center_epoch: NotNegative = 10.0  # both parts have half there
    period_epochs: Positive = 5.0  # how slowly one gives way to the other
    literal: bool = False  # the transition as printed, which overshoots
    whole_epochs: bool = False  # the transition moves from epoch to epoch, not within


class OptimizerConfig(Section):
    """The optimizer. A value is a number, or a list of pieces over epochs."""

    name: Literal["sgd", "lars", "rmsprop_warmup"] = "sgd"
    lr: Scheduled = 0.1
    lr_factor: NotNegative = 1.0  # times the learning rate, all along: its level without touching its shape
    momentum: Scheduled = 0.9
    nesterov: bool = False  # step along the momentum that the next step will have
    weight_decay: Scheduled = 1e-4
    decay_norm_and_bias: bool = False  # let weight decay act on batch-norms and biases too
    lars: LarsConfig = LarsConfig()
    rmsprop_warmup: RmspropWarmupConfig = RmspropWarmupConfig()

    @model_validator(mode="after")
    def _values_can_work(self) -> OptimizerConfig:
        for name in ("lr", "momentum", "weight_decay"):
            schedule = getattr(self, name)
            if isinstance(schedule, tuple):
                check_pieces(schedule, f"optimizer.{name}")
        if (largest := largest_value(self.momentum)) >= 1:
            raise ValueError(f"optimizer.momentum {largest:g} never forgets and cannot be used; keep it below 1")
        if self.nesterov and value_at(self.momentum, 0.0) == 0.0:
            raise ValueError("optimizer.nesterov needs optimizer.momentum above 0 from the start; set one or the other")
        if self.nesterov and self.name == "rmsprop_warmup":
            raise ValueError("optimizer.nesterov is not part of rmsprop_warmup; set it to false, or use sgd or lars")
        if self.name == "rmsprop_warmup" and value_at(self.lr, 0.0) * self.lr_factor == 0.0:
            raise ValueError(
                "optimizer.lr begins with 0, and rmsprop_warmup divides by it; begin above 0: it is a warm-up by itself"
            )
        return self
