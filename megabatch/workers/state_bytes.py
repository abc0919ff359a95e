"""A training state as bytes, for another worker: tensors and plain values only, nothing is ever unpickled.

Tensors travel as safetensors; the structure around them as JSON in its metadata, where a tensor is a number. Keys of a
dictionary may be numbers too, as an optimizer's are, so a dictionary is written as a list of pairs. A tensor keeps its
strides: an optimizer may add up its elements in the order of memory, so the layout decides about bits.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch

from megabatch.errors import CommunicationError

_STRUCTURE = "structure"


def pack(state: dict[str, Any]) -> bytes:
    """The state as bytes."""
    tensors: dict[str, torch.Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dense = value.detach().cpu().clone()  # as it lies in memory, without gaps
            tensors[str(len(tensors))] = dense.contiguous()
            return {"tensor": len(tensors) - 1, "strides": dense.stride()}
        if is_dataclass(value) and not isinstance(value, type):
            return plain(asdict(value))
        if isinstance(value, dict):
            return {"pairs": [[key, plain(one)] for key, one in value.items()]}
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"a training state holds a {type(value).__name__}, which cannot be sent")

    structure = json.dumps(plain(state))
    return safetensors.torch.save(tensors, metadata={_STRUCTURE: structure})


def unpack(content: bytes) -> dict[str, Any]:
    """The state that `pack` made bytes of.

    Raises:
        CommunicationError: the bytes are something else.
    """

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            if "tensor" in value:
                return _laid_out(tensors[str(value["tensor"])], value["strides"])
            return {key: whole(one) for key, one in value["pairs"]}
        return [whole(one) for one in value] if isinstance(value, list) else value

    try:
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        state = whole(json.loads(header["__metadata__"][_STRUCTURE]))
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:
        raise CommunicationError(f"another worker sent a state that cannot be read ({error})") from None
    if not isinstance(state, dict):
        raise CommunicationError("another worker sent something else than a training state")
    return state


def _laid_out(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """The same values with these strides; ValueError where they would leave gaps."""
    if sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1 > tensor.numel() > 0:
        raise ValueError(f"strides {strides} do not fit the shape {list(tensor.shape)}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
