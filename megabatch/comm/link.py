"""One axis of the grid as this rank sees it: send to, receive from and wait for the other positions, in
bounded time.

The only place where this package touches Gloo's point-to-point calls. It speaks to the backend object
directly: `dist.isend` and `dist.irecv` cost several times more Python per message, which small tensors feel.

Order: Gloo matches messages of one (sender, tag) in the order sent with receives in the order posted. A tag
that is unique to one collective call is therefore enough, and calls running at the same time on one group
cannot mix.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ACTION_SHIFT", "MAX_ACTIONS", "Link", "Scratch", "hang_up", "kept_tag", "message_tag"]

MAX_ACTIONS = 63
"""Primitives in one call: their number has six bits of the tag, and the last value is for `hang_up`."""

ACTION_SHIFT = 15
"""Where the number of the primitive stands in a tag."""

_CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 64
_CALLS_IN_FLIGHT = 512  # nine bits of the tag; calls further apart may share tags, and never overlap
_KEPT = 1 << 30
_NOBODY_SENDS = 2**31 - 1


class Link:
    """The ranks along one axis, addressed by position. Not shared between threads.

    ranks: global ranks by position. `waiting_for` is the global rank of the latest wait, for error messages.
    """

    __slots__ = ("_backend", "_sends", "_timeout", "group", "position", "ranks", "size", "waiting_for")

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], position: int, timeout_seconds: float) -> None:
        self.group = group
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.position = position
        self.waiting_for: int | None = None
        self._timeout = timedelta(seconds=timeout_seconds)
        self._backend: Any = group._get_backend(_CPU)
        self._sends: list[tuple[Any, torch.Tensor, int]] = []

    def send(self, part: torch.Tensor, to: int, tag: int) -> None:
        """Start sending; `part` must not change before `flush`, unless the receiver is known to have it."""
        if part.numel():
            self._sends.append((self._backend.send([part], to, tag), part, to))

    def receive(self, part: torch.Tensor, source: int, tag: int) -> Any:
        """Post a receive into `part` and return the handle for `wait`; an empty part does not travel."""
        return self._backend.recv([part], source, tag) if part.numel() else None

    def wait(self, handle: Any, source: int) -> None:
        """Block until a posted receive has arrived."""
        if handle is not None:
            self.waiting_for = self.ranks[source]
            handle.wait(self._timeout)

    def flush(self) -> None:
        """Block until everything sent has left this rank."""
        for work, _, to in self._sends:
            self.waiting_for = self.ranks[to]
            work.wait(self._timeout)
        self._sends.clear()


class Scratch:
    """Receive buffers of one call, cut from a block that is kept for the next call and grown as needed."""

    __slots__ = ("_block", "_dtype", "_used_bytes")

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._dtype = torch.float32
        self._used_bytes = 0

    def reset(self, dtype: torch.dtype) -> None:
        """Begin a call with elements of `dtype`; buffers taken before are free for reuse."""
        if self._block.numel() < self._used_bytes:
            self._block = torch.empty(self._used_bytes, dtype=torch.uint8)
        self._dtype = dtype
        self._used_bytes = 0

    def take(self, numel: int) -> torch.Tensor:
        """A buffer of `numel` elements, valid until the next `reset`."""
        start, end = self._used_bytes, self._used_bytes + numel * self._dtype.itemsize
        self._used_bytes = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if end <= self._block.numel():
            return self._block[start:end].view(self._dtype)
        return torch.empty(numel, dtype=self._dtype)


def message_tag(call: int, message: str, action: int = 0) -> int:
    """Tag of one primitive of a call: nine bits of the call, six of the action, fifteen of what is reduced.

    Ranks that disagree about the message then wait in vain, and say so in bounded time, where Gloo would end
    the process for a message longer than the receive posted for it.
    """
    assert 0 <= action < MAX_ACTIONS
    return (call % _CALLS_IN_FLIGHT) << 21 | action << ACTION_SHIFT | zlib.crc32(message.encode()) & 0x7FFF


def kept_tag(first_call: int, message: str) -> int:
    """Tag of the first primitive of a passage that is used again and again, beginning with `first_call`.

    One tag serves all its rounds: messages of one (sender, tag) match in order, and rounds follow one another.
    """
    return _KEPT | message_tag(first_call, message)


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this rank's Gloo connections of `group`, so that peers waiting for it fail at once.

    Gloo's abort and shutdown leave the connections open; a receive that times out closes all of them. So one
    is posted that nobody will answer.
    """
    backend: Any = group._get_backend(_CPU)
    peer = (group.rank() + 1) % group.size()
    try:
        backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _NOBODY_SENDS).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return
