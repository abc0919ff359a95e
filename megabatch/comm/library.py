"""The backend's own collectives behind the interface of `primitives`: for NCCL, which knows its links better
than we do.

The pattern of a phase (ring, direct, ...) is then the library's choice. Calls are enqueued on the current
stream in program order and return at once on CUDA; nothing is posted ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LIBRARY", "LibraryLink"]

# torch 2.13 renamed both and warns about the former names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class LibraryLink:
    """The ranks along one axis for a backend that does its own collectives."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    position: int
    timeout_seconds: float
    waiting_for: int | None = None

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        return len(self.ranks)

    def flush(self) -> None:
        """Nothing is left under way: the backend orders its own work."""


def _own_chunk(link: LibraryLink, part: torch.Tensor) -> torch.Tensor:
    length, rest = divmod(part.numel(), link.size)
    assert rest == 0, "the backend needs equal chunks; AllReducer pads"
    return part[link.position * length : (link.position + 1) * length]


def _finish(work: Any, part: torch.Tensor, link: LibraryLink) -> None:
    """Wait in bounded time; on CUDA the stream waits and not the host, and NCCL's watchdog bounds it."""
    if part.is_cuda:
        work.wait()
    else:
        work.wait(timedelta(seconds=link.timeout_seconds))


def _primitive(
    issue: Callable[[LibraryLink, torch.Tensor], Any],
) -> Callable[..., Generator[None, None, None]]:
    def run(link: LibraryLink, part: torch.Tensor, *_: object) -> Generator[None, None, None]:
        while True:
            yield
            _finish(issue(link, part), part, link)
            yield

    return run


LIBRARY: dict[str, Callable[..., Generator[None, None, None]]] = {
    "reduce_scatter": _primitive(
        lambda link, part: _reduce_scatter(_own_chunk(link, part), part, group=link.group, async_op=True)
    ),
    "all_gather": _primitive(
        lambda link, part: _all_gather(part, _own_chunk(link, part), group=link.group, async_op=True)
    ),
    "all_reduce": _primitive(lambda link, part: dist.all_reduce(part, group=link.group, async_op=True)),
    "exchange": _primitive(lambda link, part: dist.all_reduce(part, group=link.group, async_op=True)),
    "reduce": _primitive(lambda link, part: dist.reduce(part, link.ranks[0], group=link.group, async_op=True)),
    "broadcast": _primitive(lambda link, part: dist.broadcast(part, link.ranks[0], group=link.group, async_op=True)),
}
"""Operation -> primitive with the same two halves as those on Gloo; the first half does nothing."""
