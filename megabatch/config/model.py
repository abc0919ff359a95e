"""Settings of the network and of its batch-norm statistics."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from megabatch.config.section import NotNegative, PositiveInt, Section


class ModelConfig(Section):
    """The network: a built-in name, `timm:NAME` or `package.module:function`.

    `ema_half_life_epochs` above 0 averages the weights over the run; the average is what is evaluated and saved as the
    model. A step weighs half after so many epochs of images, whatever the batch. Batch-norm statistics of the average
    are measured over `norm.exact_batches` ghost batches, 32 where that is 0.

    `pretrained` begins with trained weights instead of random ones: a file, "timm" (timm's own for this name) or
    "hub:ORG/NAME" (of Hugging Face). The head is replaced where the number of classes differs. `freeze_backbone` trains
    the head alone; batch-norm statistics still follow the images.
    """

    name: str = "resnet50"  # built-in name, timm:NAME or package.module:function
    zero_gamma: Literal["none", "every_block", "last_block_of_stage"] = "every_block"  # batch-norms that start at 0
    width: PositiveInt | None = None  # channels of a small network's first stage; None: its own default
    ema_half_life_epochs: NotNegative = 0.0  # 0: weights are not averaged
    pretrained: str = ""  # FILE.safetensors, timm or hub:ORG/NAME; empty: random weights
    freeze_backbone: bool = False  # only the head is trained
    backbone_lr_factor: Annotated[float, Field(gt=0, le=1)] = 1.0  # lr of all but the head, over that of the head

    @field_validator("pretrained")
    @classmethod
    def _is_known(cls, value: str) -> str:
        is_hub = re.fullmatch(r"hub:[\w.-]+/[\w.-]+", value) is not None
        if value and value != "timm" and not is_hub and not value.endswith(".safetensors"):
            raise ValueError(f"'{value}' names no weights; give FILE.safetensors, timm or hub:ORG/NAME")
        return value

    @model_validator(mode="after")
    def _is_not_half_frozen(self) -> ModelConfig:
        if self.freeze_backbone and self.backbone_lr_factor != 1.0:
            raise ValueError("backbone_lr_factor has no effect with freeze_backbone; leave one of them out")
        return self

    @property
    def label(self) -> str:
        """The name, with the width where that is not the network's own: what tells step times apart."""
        return self.name if self.width is None else f"{self.name} of width {self.width}"


class NormConfig(Section):
    """Batch-norm statistics used for evaluation.

    `momentum` is the weight of the newest step in the running average (PyTorch calls it momentum; Codreanu's
    moving-average fraction 0.95 is 0.05 here). With 1.0 there is no moving average: the statistics of the last
    step's ghost batches alone are averaged over all workers (Akiba 2017, section 2).
    `variance` "plain" averages the ghosts' variances as that paper does, "pooled" adds the variance of their means.
    `exact_batches` k above 0 measures the statistics anew before each evaluation and checkpoint, by forward passes
    over the k ghost batches that come next, instead of taking what training left behind.
    """

    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1  # weight of the newest step; 1: no moving average
    variance: Literal["plain", "pooled"] = "plain"  # pooled: with the variance of the means
    exact_batches: Annotated[int, Field(ge=0)] = 0  # >0: measured anew over so many ghost batches
