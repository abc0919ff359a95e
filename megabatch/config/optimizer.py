"""Settings of the optimizer and of its scheduled values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megabatch.config.section import NotNegative, Positive, Section
from megabatch.errors import nearest
from megabatch.foreign import is_foreign_name
from megabatch.schedule.pieces import Scheduled, check_pieces, largest_value, value_at

_KNOWN = ("sgd", "lars", "lamb", "shampoo", "rmsprop_warmup", "adamw", "nadamw")
_SCHEDULED = ("lr", "momentum", "weight_decay")


class LarsConfig(Section):
    """Layer-wise rates, for `optimizer.name = "lars"`; `megabatch.optim.lars` says what the rules are."""

    rule: Literal["paper", "trust_inside", "trust_outside"] = "paper"  # where the trust ratio enters
    trust_coefficient: Positive = 0.001  # the paper's eta
    eps: NotNegative = 0.0  # added to the denominator of the trust ratio
    clip: bool = False  # a layer's own lr never exceeds `lr`


class LambConfig(Section):
    """Layer-wise rates for Adam, for `optimizer.name = "lamb"`; `megabatch.optim.lamb` says what it does."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999  # share of the past in the mean of squared gradients
    eps: Positive = 1e-6  # added to the root of that mean
    bias_correction: bool = True  # take the zeros at the start out of both means


class ShampooConfig(Section):
    """Preconditioned SGD, for `optimizer.name = "shampoo"`; `megabatch.optim.shampoo` says what it does."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.85  # share of the past in the statistics
    eps: Positive = 1.5e-5  # added to eigenvalues, as a share of the largest
    root: Annotated[int, Field(ge=1)] = 4  # preconditioners are statistics to the power of -1 / root
    block_size: Annotated[int, Field(ge=1)] = 128  # dimensions are cut into equal parts of at most this length
    every_steps: Annotated[int, Field(ge=1)] = 20  # how often roots are computed
    start_steps: Annotated[int, Field(ge=1)] = 25  # steps of plain momentum SGD before that


class AdamConfig(Section):
    """Adam with weight decay of its own, for `optimizer.name = "adamw"` and, with Nesterov's step, "nadamw"."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999  # share of the past in the mean of squared gradients
    eps: Positive = 1e-8  # added to the root of that mean


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
    """The optimizer. A value is a number, or a list of pieces over epochs.

    `name` is one of ours and torch's, or "package.module:Class" for any other `torch.optim.Optimizer`, which takes
    `settings`. `momentum` is beta1 of those that have betas.
    """

    name: str = "sgd"  # sgd, lars, lamb, shampoo, rmsprop_warmup, adamw, nadamw, or "package.module:Class"
    lr: Scheduled = 0.1  # learning rate, a number or pieces over epochs
    lr_factor: NotNegative = 1.0  # times the learning rate, all along: its level without touching its shape
    momentum: Scheduled = 0.9  # share of the past direction; beta1 of Adam and LAMB
    nesterov: bool = False  # step along the momentum that the next step will have
    weight_decay: Scheduled = 1e-4  # pull of the weights towards zero
    decay_norm_and_bias: bool = False  # let weight decay act on batch-norms and biases too
    clip_norm: NotNegative = 0.0  # a larger norm of the whole gradient is scaled down to this; 0: never
    lars: LarsConfig = LarsConfig()
    lamb: LambConfig = LambConfig()
    shampoo: ShampooConfig = ShampooConfig()
    adam: AdamConfig = AdamConfig()
    rmsprop_warmup: RmspropWarmupConfig = RmspropWarmupConfig()
    settings: dict[str, Any] = Field(default_factory=dict)  # of "package.module:Class"

    @property
    def is_foreign(self) -> bool:
        """Whether the name is that of a class from elsewhere."""
        return ":" in self.name

    @model_validator(mode="after")
    def _name_is_known(self) -> OptimizerConfig:
        if self.is_foreign:
            if not is_foreign_name(self.name):
                raise ValueError(f"optimizer.name '{self.name}' is not of the form package.module:Class")
        elif self.name not in _KNOWN:
            hint = nearest(self.name, _KNOWN)
            raise ValueError(
                f"optimizer.name '{self.name}' is not known{hint}; choose one of {', '.join(_KNOWN)}, "
                "or give package.module:Class"
            )
        elif self.settings:
            raise ValueError(
                f"optimizer.settings are those of a package.module:Class, but optimizer.name is '{self.name}'; "
                "use the settings beside it, or leave them out"
            )
        for name in _SCHEDULED:
            if name in self.settings:
                raise ValueError(f"optimizer.settings.{name} would be overwritten; set optimizer.{name}")
        return self

    @model_validator(mode="after")
    def _values_can_work(self) -> OptimizerConfig:
        for name in _SCHEDULED:
            schedule = getattr(self, name)
            if isinstance(schedule, tuple):
                check_pieces(schedule, f"optimizer.{name}")
        if (largest := largest_value(self.momentum)) >= 1:
            raise ValueError(f"optimizer.momentum {largest:g} never forgets and cannot be used; keep it below 1")
        if self.nesterov and value_at(self.momentum, 0.0) == 0.0:
            raise ValueError("optimizer.nesterov needs optimizer.momentum above 0 from the start; set one or the other")
        if self.nesterov and self.name not in ("sgd", "lars", "shampoo"):
            raise ValueError(
                f"optimizer.nesterov is not part of {self.name}; set it to false, or use sgd, lars or shampoo"
            )
        if self.name == "rmsprop_warmup" and value_at(self.lr, 0.0) * self.lr_factor == 0.0:
            raise ValueError(
                "optimizer.lr begins with 0, and rmsprop_warmup divides by it; begin above 0: it is a warm-up by itself"
            )
        return self
