"""Settings of the update rule and of its scheduled values."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megabatch.config.section import Section
from megabatch.schedule.pieces import Scheduled, value_at

__all__ = ["OptimizerConfig"]


class OptimizerConfig(Section):
    """The update rule. A value is a number, or a list of pieces over epochs."""

    name: Literal["sgd"] = "sgd"
    learning_rate: Scheduled = 0.1
    momentum: Scheduled = 0.9
    nesterov: bool = False
    weight_decay: Scheduled = 1e-4
    decay_norm_and_bias: bool = False

    @model_validator(mode="after")
    def _pieces_rise(self) -> OptimizerConfig:
        for name in ("learning_rate", "momentum", "weight_decay"):
            pieces = getattr(self, name)
            if not isinstance(pieces, tuple):
                continue
            ends = [piece.until_epoch for piece in pieces]
            if not ends or sorted(set(ends)) != ends:
                raise ValueError(f"the pieces of optimizer.{name} must have rising until_epoch values, given {ends}")
        if self.nesterov and value_at(self.momentum, 0.0) == 0.0:
            raise ValueError("optimizer.nesterov needs optimizer.momentum above 0 from the start; set one or the other")
        return self
