"""Which parameters are decayed and adapted: chosen by the type of the module that owns them, never by name.

Batch-norm scales and shifts and all biases are left undecayed (Goyal 2017, section 5.3; Codreanu 2017 leaves
batch-norm undecayed) and out of LARS (MLPerf's reference skips both). Names are no guide: the shortcut's batch-norm is
called `downsample.1`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["decayed_group", "parameter_groups"]

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
