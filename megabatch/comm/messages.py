"""Plain values between ranks, as JSON: the only way in which this package exchanges anything but tensors.

torch's own `all_gather_object` and its kin unpickle what they receive: whoever can speak to a rank could run code in
it. Here bytes travel in tensors, their number is bounded, and what arrives must be of the type that was asked for.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from megabatch.comm.p2p import uses_gloo
from megabatch.errors import CommunicationError

T = TypeVar("T")

_MAX_JSON_BYTES = 16 * 2**20
_MAX_STATE_BYTES = 2**40


def gather(value: T, kind: type[T]) -> list[T]:
    """What every rank of the default group passed, by rank; every rank must call it. `kind` may be `list[str]`.

    Raises:
        CommunicationError: what a rank sent is too long or of another type.
    """
    mine = _encode(value)
    device, world_size = _device(), dist.get_world_size()
    sizes = torch.zeros(world_size, dtype=torch.int64, device=device)
    sizes[dist.get_rank()] = len(mine)
    dist.all_reduce(sizes)
    lengths = [_checked(length, rank, _MAX_JSON_BYTES) for rank, length in enumerate(sizes.tolist())]
    padded = _tensor(mine + bytes(max(lengths) - len(mine)), device)
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded)
    return [
        _decode(_bytes(row[:length]), kind, rank) for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def broadcast(value: T, kind: type[T]) -> T:
    """What the main rank passed; every rank must call it. What the others pass is not looked at.

    Raises:
        CommunicationError: what the main rank sent is too long or of another type.
    """
    data = broadcast_bytes(_encode(value) if dist.get_rank() == 0 else None, _MAX_JSON_BYTES)
    assert data is not None
    return _decode(data, kind, 0)


def broadcast_bytes(data: bytes | None, max_bytes: int = _MAX_STATE_BYTES) -> bytes | None:
    """The bytes that the main rank passed, or None; every rank must call it.

    Raises:
        CommunicationError: they are more than `max_bytes`.
    """
    device = _device()
    size = torch.tensor([-1 if data is None else len(data)], device=device)
    dist.broadcast(size, 0)
    length = int(size)
    if length == -1:
        return None
    _checked(length, 0, max_bytes)
    content = _tensor(data or b"", device) if dist.get_rank() == 0 else torch.empty(length, dtype=torch.uint8)
    content = content.to(device)
    dist.broadcast(content, 0)
    return _bytes(content)


def _encode(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _decode(data: bytes, kind: type[T], rank: int) -> T:
    try:
        return TypeAdapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise CommunicationError(
            f"rank {rank} sent something else than was asked for ({first}); run the same version on every rank"
        ) from None


def _checked(length: int, rank: int, max_bytes: int) -> int:
    if not 0 <= length <= max_bytes:
        raise CommunicationError(
            f"rank {rank} wants to send {length} bytes, at most {max_bytes} are taken; "
            "run the same version on every rank"
        )
    return length


def _device() -> torch.device:
    group = dist.group.WORLD
    assert group is not None
    on_cpu = uses_gloo(group) or not torch.cuda.is_available()
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        if data
        else torch.empty(0, dtype=torch.uint8, device=device)
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
