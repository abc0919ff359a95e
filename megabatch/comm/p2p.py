"""One axis of the grid as this rank sees it: send to, receive from and wait for the other positions, in bounded time.

`Link` is the only place where this package touches Gloo's point-to-point calls. It speaks to the backend object
directly: `dist.isend` and `dist.irecv` cost several times more Python per message, which small tensors feel.

Order: Gloo matches messages of one (sender, tag) in the order sent with receives in the order posted. A tag that is
unique to one collective call is therefore enough, and calls running at the same time on one group cannot mix.

`LIBRARY` holds the backend's own collectives behind the interface of `primitives`: for NCCL, which knows its links
better than we do. The pattern of a phase (ring, direct, ...) is then the library's choice. Calls are
enqueued on the current stream in program order and return at once on CUDA; nothing is posted ahead.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megabatch.comm.shape import ranks_text
from megabatch.errors import LaunchError

MAX_ACTIONS = 63
"""Primitives in one call: their number has six bits of the tag, and the last value is for `hang_up`."""

ACTION_SHIFT = 15
"""Where the number of the primitive stands in a tag."""

_CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 64
_CALLS_IN_FLIGHT = 512  # nine bits of the tag; calls further apart may share tags, and never overlap
_CACHED = 1 << 30
_NOBODY_SENDS = 2**31 - 1

# torch 2.13 renamed both and warns about the former names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PeerLostError(Exception):
    """A message could not be sent or did not come.

    peer: global rank of the other side, None where the backend does not tell. timed_out: the whole time allowed has
    passed; otherwise the connection broke. phase: what was running; whoever runs phases fills it in.
    """

    def __init__(self, peer: int | None, *, timed_out: bool) -> None:
        super().__init__(f"rank {peer}")
        self.peer = peer
        self.timed_out = timed_out
        self.phase = ""


class Link:
    """The ranks along one axis, addressed by position; `ranks` are global. Not shared between threads.

    Only where the group uses Gloo can it send and receive. Every method raises `PeerLostError` when the other side is
    gone or the timeout has passed.
    """

    __slots__ = ("_backend", "_sends", "group", "position", "ranks", "size", "timeout")

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], position: int, timeout_seconds: float) -> None:
        self.group = group
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.position = position
        self.timeout = timedelta(seconds=timeout_seconds)
        self._backend: Any = group._get_backend(_CPU) if uses_gloo(group) else None
        self._sends: list[tuple[Any, torch.Tensor, int]] = []

    def send(self, part: torch.Tensor, to: int, tag: int) -> None:
        """Start sending; `part` must not change before `flush`, unless the receiver is known to have it."""
        if part.numel():
            try:
                self._sends.append((self._backend.send([part], to, tag), part, to))
            except RuntimeError as error:
                raise PeerLostError(self.ranks[to], timed_out=False) from error

    def receive(self, part: torch.Tensor, source: int, tag: int) -> Any:
        """Post a receive into `part` and return the handle for `wait`; an empty part does not travel."""
        if not part.numel():
            return None
        try:
            return self._backend.recv([part], source, tag)
        except RuntimeError as error:
            raise PeerLostError(self.ranks[source], timed_out=False) from error

    def wait(self, handle: Any, source: int) -> None:
        """Block until a posted receive has arrived."""
        if handle is not None:
            _wait(handle, self.timeout, self.ranks[source])

    def flush(self) -> None:
        """Block until everything sent has left this rank."""
        for work, _, to in self._sends:
            _wait(work, self.timeout, self.ranks[to])
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


def cached_tag(first_call: int, message: str) -> int:
    """Tag of the first primitive of a passage that is used again and again, beginning with `first_call`.

    One tag serves all its rounds: messages of one (sender, tag) match in order, and rounds follow one another.
    """
    return _CACHED | message_tag(first_call, message)


def group_timeout(backend: str, timeout_seconds: float) -> timedelta:
    """How long a group waits for a rank that may be silent for so long.

    NCCL then ends the process without a name. It waits longer than others who notice the loss, and say who it is.
    """
    return timedelta(seconds=1.1 * timeout_seconds + 30.0 if "nccl" in backend else timeout_seconds)


def new_group(ranks: Sequence[int], name: str, timeout_seconds: float, build: str) -> dist.ProcessGroup:
    """Make the group of these ranks, which alone take part; `build` tells the grids of a job apart.

    Raises:
        LaunchError: they could not connect.
    """
    try:
        with group_named(f"{build} {name} {list(ranks)}"):
            group: dist.ProcessGroup = dist.new_group(
                list(ranks),
                timeout=group_timeout(str(dist.get_backend()), timeout_seconds),
                use_local_synchronization=True,
                group_desc=f"megabatch {name}",
            )
    except RuntimeError as error:
        raise LaunchError(
            f"the {name} of {ranks_text(ranks)} could not connect within {timeout_seconds:g} s "
            f"({str(error).splitlines()[0]}); look at their logs and at the network between them"
        ) from error
    return group


@contextlib.contextmanager
def group_named(text: str) -> Iterator[None]:
    """Within this block torch calls a new group after `text`.

    By itself torch names a group after its ranks and the number of groups that now exist. A grid built after another
    was closed would get that one's names, and find its dead addresses in the job's store; and ranks that hold different
    numbers of groups would wait under different names.
    """
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    torch_module: Any = dist.distributed_c10d
    torch_names = torch_module._process_group_name
    torch_module._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        torch_module._process_group_name = torch_names


def uses_gloo(group: dist.ProcessGroup) -> bool:
    """Whether tensors on the CPU travel by Gloo in this group."""
    return "cpu:gloo" in str(dist.get_backend_config(group))


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this rank's Gloo connections of `group`, so that peers waiting for it fail at once.

    Gloo's abort and shutdown leave the connections open; a receive that times out closes all of them. So one
    is posted that nobody will answer, to each peer: one from a peer that is gone fails at once and closes nothing.
    """
    backend: Any = group._get_backend(_CPU)
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                work = backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _NOBODY_SENDS)
                work.wait(timedelta(milliseconds=1))


def _wait(work: Any, timeout: timedelta, peer: int | None) -> None:
    """Wait in bounded time. The backend tells its failures apart in words only, so the clock decides which it was."""
    start = time.monotonic()
    try:
        work.wait(timeout)
    except RuntimeError as error:
        timed_out = time.monotonic() - start >= 0.99 * timeout.total_seconds()
        raise PeerLostError(peer, timed_out=timed_out) from error


def own_chunk(part: torch.Tensor, position: int, size: int) -> torch.Tensor:
    """The part of a message that a rank owns; lengths differ by at most one element, and every rank cuts alike."""
    numel = part.numel()
    return part[numel * position // size : numel * (position + 1) // size]


def _primitive(issue: Callable[[Link, torch.Tensor, bool], Any]) -> Callable[..., Generator[None, None, None]]:
    """issue: (link, part, async_op). On CUDA it is not asynchronous: the collective then runs on the current stream
    itself, which is ours and urgent, and not on one of the group's; the host waits in neither case, and NCCL's watchdog
    bounds it."""

    def run(link: Link, part: torch.Tensor, *_: object) -> Generator[None, None, None]:
        while True:
            yield
            try:
                work = issue(link, part, not part.is_cuda)
            except RuntimeError as error:
                raise PeerLostError(None, timed_out=False) from error
            if work is not None:
                _wait(work, link.timeout, None)
            yield

    return run


_all_reduce = _primitive(lambda link, part, later: dist.all_reduce(part, group=link.group, async_op=later))

LIBRARY: dict[str, Callable[..., Generator[None, None, None]]] = {
    "reduce_scatter": _primitive(
        lambda link, part, later: _reduce_scatter(
            own_chunk(part, link.position, link.size), part, group=link.group, async_op=later
        )
    ),
    "all_gather": _primitive(
        lambda link, part, later: _all_gather(
            part, own_chunk(part, link.position, link.size), group=link.group, async_op=later
        )
    ),
    "all_reduce": _all_reduce,
    "exchange": _all_reduce,
    "reduce": _primitive(lambda link, part, later: dist.reduce(part, link.ranks[0], group=link.group, async_op=later)),
    "broadcast": _primitive(
        lambda link, part, later: dist.broadcast(part, link.ranks[0], group=link.group, async_op=later)
    ),
}
"""Operation -> primitive with the same two halves as those on Gloo; the first half does nothing. Chunks must be equal:
`AllReducer` pads."""
