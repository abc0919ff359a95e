"""Groups of parameters: weights, and the batch-norms and biases that weight decay and layer-wise rates spare."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["clear_state", "parameter_groups", "split_groups"]

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


def split_groups(groups: list[dict[str, Any]], head: nn.Module, factor: float) -> list[dict[str, Any]]:
    """The groups, each in two: what is not in `head` has `lr_factor` `factor`; an empty one is left out."""
    in_head = {id(parameter) for parameter in head.parameters()}
    split: list[dict[str, Any]] = []
    for group in groups:
        slow = [p for p in group["params"] if id(p) not in in_head]
        fast = [p for p in group["params"] if id(p) in in_head]
        split += [{**group, "params": slow, "lr_factor": factor}, {**group, "params": fast, "lr_factor": 1.0}]
    return [group for group in split if group["params"]]


def clear_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer forget all steps before; lr and the like stay."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop("step", None)  # where some optimizers count; with it they take their state to be there
