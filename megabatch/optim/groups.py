"""Which parameters are decayed: chosen by the type of the module that owns them, never by name.

Batch-norm scales and shifts and all biases are left undecayed (Goyal 2017, section 5.3; Codreanu 2017 leaves
batch-norm undecayed). Names are no guide: the shortcut's batch-norm is called `downsample.1`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["parameter_groups"]

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def parameter_groups(model: nn.Module, decay_norm_and_bias: bool = False) -> list[dict[str, Any]]:
    """Two groups of trainable parameters for an optimiser: `decay_factor` 1 and 0; an empty one is left out.

    The engine multiplies the scheduled weight decay by a group's `decay_factor`.
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            spared = isinstance(module, _NORMS) or name.endswith("bias")
            (undecayed if spared and not decay_norm_and_bias else decayed).append(parameter)
    groups = [{"params": decayed, "decay_factor": 1.0}, {"params": undecayed, "decay_factor": 0.0}]
    return [group for group in groups if group["params"]]
