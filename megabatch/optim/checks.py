"""What every optimizer here refuses: settings below zero, sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.errors import ConfigError

__all__ = ["check_not_negative", "gradients_of"]


def gradients_of(params: list[Tensor], optimizer: str) -> list[Tensor]:
    """The gradients of parameters that have some.

    Raises:
        ConfigError: a sparse gradient.
    """
    grads = [p.grad for p in params if p.grad is not None]
    if any(g.layout is not torch.strided for g in grads):
        raise ConfigError(
            f"{optimizer} was given a sparse gradient and needs dense ones; build Embedding(sparse=False)"
        )
    return grads


def check_not_negative(optimizer: str, **values: float | Tensor) -> None:
    """Refuse a setting below zero or not finite; a tensor is taken as it is, to read it would wait for the device."""
    for name, value in values.items():
        if not isinstance(value, Tensor) and not 0.0 <= value < float("inf"):
            raise ConfigError(f"{optimizer} {name} {value:g} cannot be used; give a finite number of at least 0")
