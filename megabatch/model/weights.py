"""Weights as safetensors files, and the average of several.

Codreanu 2017 averages the probabilities of an ensemble's members, at the price of one forward pass per member.
Averaging weights costs one pass, but is only as good as the straight line between the members is flat; `megabatch
evaluate --ensemble` shows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from megabatch.errors import CheckpointError
from megabatch.files import open_regular

__all__ = ["average_weights", "read_weights", "weights_bytes"]


def average_weights(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of every floating-point tensor, taken in float64; of counters the newest."""
    averaged: dict[str, Tensor] = {}
    for name, newest in states[-1].items():
        if newest.is_floating_point():
            averaged[name] = torch.stack([state[name].double() for state in states]).mean(dim=0).to(newest.dtype)
        else:
            averaged[name] = newest.clone()
    return averaged


def weights_bytes(network: nn.Module) -> bytes:
    """The network's weights and statistics in plain names, the same bytes for the same numbers."""
    # Clones, because weights that are tied share memory and the format does not store that.
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in network.state_dict().items()
    }
    # One entry only: the library writes several in an order that changes from run to run.
    return safetensors_bytes(tensors, metadata={"format": "pt"})


def read_weights(path: Path) -> dict[str, Tensor]:
    """What `weights_bytes` wrote.

    Raises:
        CheckpointError: when the file cannot be read.
    """
    try:
        with open_regular(path) as file:  # the library would wait for a pipe, and map a file of any size
            if not int.from_bytes(file.read(8), "little"):
                raise ValueError("it has no header")
            return load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"'{path}' cannot be read ({error}); the file is damaged, train it again") from None
