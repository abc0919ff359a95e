"""Parameter groups, and what every optimizer here refuses: settings below zero, sparse gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from megabatch.errors import ConfigError

__all__ = ["check_not_negative", "clear_state", "decayed_group", "gradients_of", "parameter_groups"]

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def parameter_groups(
    model: nn.Module, decay_norm_and_bias: bool = False, *, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Two groups of trainable parameters: weights, then batch-norm and biases; an empty one is left out.

    Weights have `decay_factor` 1 and `lars` True, the others 0 and False. `megabatch.LARS` and
    `megabatch.RMSpropWarmup` honour both marks. For an optimizer that does not know them, such as `torch.optim.SGD`,
    give `weight_decay` here: every group then carries its own.
    """
    weights: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_spared = isinstance(module, _NORMS) or name.endswith("bias")
            (spared if is_spared else weights).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": weights, "decay_factor": 1.0, "lars": True},
        {"params": spared, "decay_factor": 1.0 if decay_norm_and_bias else 0.0, "lars": False},
    ]
    for group in groups:
        if weight_decay is not None:
            group["weight_decay"] = weight_decay * group["decay_factor"]
    return [group for group in groups if group["params"]]


def decayed_group(group: dict[str, Any], weight_decay: float) -> dict[str, Any]:
    """The group with a weight decay of its own: what it names, or the optimizer's times its `decay_factor`."""
    return {"weight_decay": weight_decay * group.get("decay_factor", 1.0), **group}


def clear_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer forget all steps before; lr and the like stay."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop("step", None)  # where some optimizers count; with it they take their state to be there


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
