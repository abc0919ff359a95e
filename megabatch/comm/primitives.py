"""Reduce-scatter, all-gather and relatives on Gloo, with receives posted ahead and large parts sent in
segments.

Why own ones: Gloo's reduce-scatter is an all-reduce inside (twice the bytes), and a Gloo message whose
receive is not yet posted costs a round trip instead of one way, because sender and receiver first agree that
both are ready.

Each primitive is a generator of two halves. Up to its `yield` it posts all its receives; after it, it runs.
The caller starts every primitive of an all-reduce before it runs the first, so that all but the first message
go one way.

A part arrives in place only when its sender must have seen this rank's copy before - the sum contains it -
hence no receive posted early can overwrite data that still has to be sent.

Sums: ring, halving and chain add what arrives to the own part, rounding once per hop; with half precision
torch adds in float32 and rounds the result. `direct` and `exchange` hold all terms at once: half precision is
summed in float32 and rounded once. The order of terms is fixed, so results repeat bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from megabatch.comm.link import Link, Scratch
from megabatch.comm.phases import halving_core

__all__ = ["PRIMITIVES", "Primitive", "exchange_maximum", "own_chunk", "split"]

Run = Generator[None, None, None]
Primitive = Callable[[Link, torch.Tensor, int, Scratch, int], Run]
"""(link, part of the message, tag, scratch, segment bytes) -> generator: posts, yields once, runs."""

_MAX_SEGMENTS = 16


def split(part: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """Cut a 1-D tensor into `pieces` views whose lengths differ by at most one; every rank cuts alike."""
    bounds = _bounds(part, pieces)
    return [part[low:high] for low, high in itertools.pairwise(bounds)]


def own_chunk(part: torch.Tensor, pieces: int, index: int) -> torch.Tensor:
    """`split(part, pieces)[index]` alone."""
    numel = part.numel()
    return part[numel * index // pieces : numel * (index + 1) // pieces]


def ring_reduce_scatter(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `split(part, size)[position]` over the axis, in size - 1 hops to the right."""
    size, me = link.size, link.position
    left, right = (me - 1) % size, (me + 1) % size
    chunks = split(part, size)
    arriving = []
    for step in range(1, size):
        for own in _segments(chunks[(me - 1 - step) % size], segment_bytes):
            buffer = scratch.take(own.numel())
            arriving.append((own, buffer, link.receive(buffer, left, tag), step < size - 1))
    yield
    for own in _segments(chunks[left], segment_bytes):
        link.send(own, right, tag)
    for own, buffer, handle, goes_on in arriving:
        link.wait(handle, left)
        own.add_(buffer)
        if goes_on:
            link.send(own, right, tag)


def ring_all_gather(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Fill `part` from each position's own chunk, in size - 1 hops to the right."""
    size, me = link.size, link.position
    left, right = (me - 1) % size, (me + 1) % size
    chunks = split(part, size)
    arriving: list[tuple[torch.Tensor, Any, bool]] = []
    for step in range(1, size):
        coming = _segments(chunks[(me - step) % size], segment_bytes)
        arriving += [(other, link.receive(other, left, tag), step < size - 1) for other in coming]
    yield
    for own in _segments(chunks[me], segment_bytes):
        link.send(own, right, tag)
    for other, handle, goes_on in arriving:
        link.wait(handle, left)
        if goes_on:
            link.send(other, right, tag)


def direct_reduce_scatter(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `split(part, size)[position]` over the axis in one hop: everybody sends each owner its chunk."""
    me = link.position
    chunks = split(part, link.size)
    buffers = {other: scratch.take(chunks[me].numel()) for other in _others(link)}
    handles = {other: link.receive(buffer, other, tag) for other, buffer in buffers.items()}
    yield
    for other in _others(link):
        link.send(chunks[other], other, tag)
    for other, handle in handles.items():
        link.wait(handle, other)
    _sum_in_order(chunks[me], [buffers.get(position, chunks[me]) for position in range(link.size)])


def direct_all_gather(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Fill `part` from each position's own chunk in one hop: every owner sends to everybody."""
    chunks = split(part, link.size)
    handles = {other: link.receive(chunks[other], other, tag) for other in _others(link)}
    yield
    for other in _others(link):
        link.send(chunks[link.position], other, tag)
    for other, handle in handles.items():
        link.wait(handle, other)


def exchange(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `part` over the axis in one hop: everybody sends everything to everybody."""
    return _exchange(link, part, tag, scratch, _sum_in_order)


def exchange_maximum(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Like `exchange`, taking the greatest instead of the sum."""
    return _exchange(link, part, tag, scratch, _maximum)


def halving_all_reduce(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `part` over the axis by recursive halving, then doubling; extra ranks fold into a partner."""
    core, extra = halving_core(link.size)
    me = link.position
    paired = me < 2 * extra
    if paired and me % 2 == 1:
        handle = link.receive(part, me - 1, tag)
        yield
        link.send(part, me - 1, tag)
        link.wait(handle, me - 1)
        return
    place = me // 2 if paired else me - extra
    fold = scratch.take(part.numel()) if paired else None
    folded = link.receive(fold, me + 1, tag) if fold is not None else None
    bounds = _bounds(part, core)
    low, high, distance = 0, core, core // 2
    down: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, Any]] = []
    up: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    while distance:
        partner = _position(place ^ distance, extra)
        middle = low + distance
        keep, give = ((low, middle), (middle, high)) if place < middle else ((middle, high), (low, middle))
        kept, given = (part[bounds[start] : bounds[end]] for start, end in (keep, give))
        buffer = scratch.take(kept.numel())
        down.append((partner, kept, given, buffer, link.receive(buffer, partner, tag)))
        up.insert(0, (partner, kept, given))
        (low, high), distance = keep, distance // 2
    # Posted after the halves: between the same two ranks, messages match in the order posted.
    returning = [(partner, kept, link.receive(given, partner, tag)) for partner, kept, given in up]
    yield
    if fold is not None:
        link.wait(folded, me + 1)
        part.add_(fold)
    for partner, kept, given, buffer, handle in down:
        link.send(given, partner, tag)
        link.wait(handle, partner)
        kept.add_(buffer)
    for partner, kept, handle in returning:
        link.send(kept, partner, tag)
        link.wait(handle, partner)
    if fold is not None:
        link.send(part, me + 1, tag)


def chain_reduce(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `part` over the axis at position 0, from the last position down, segment by segment."""
    me, last = link.position, link.size - 1
    segments = _segments(part, segment_bytes)
    buffers = [scratch.take(segment.numel()) for segment in segments] if me < last else []
    handles = [link.receive(buffer, me + 1, tag) for buffer in buffers]
    yield
    for index, segment in enumerate(segments):
        if me < last:
            link.wait(handles[index], me + 1)
            segment.add_(buffers[index])
        if me > 0:
            link.send(segment, me - 1, tag)


def chain_broadcast(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Copy position 0's `part` to every position, from the first up, segment by segment."""
    me, last = link.position, link.size - 1
    segments = _segments(part, segment_bytes)
    handles = [link.receive(segment, me - 1, tag) for segment in segments] if me > 0 else []
    yield
    for index, segment in enumerate(segments):
        if me > 0:
            link.wait(handles[index], me - 1)
        if me < last:
            link.send(segment, me + 1, tag)


PRIMITIVES: dict[tuple[str, str], Primitive] = {
    ("reduce_scatter", "ring"): ring_reduce_scatter,
    ("all_gather", "ring"): ring_all_gather,
    ("reduce_scatter", "direct"): direct_reduce_scatter,
    ("all_gather", "direct"): direct_all_gather,
    ("exchange", "direct"): exchange,
    ("all_reduce", "halving"): halving_all_reduce,
    ("reduce", "chain"): chain_reduce,
    ("broadcast", "chain"): chain_broadcast,
}
"""(operation, pattern) -> primitive. A ring or direct all-reduce is a reduce-scatter, then an all-gather."""


def _bounds(part: torch.Tensor, pieces: int) -> list[int]:
    numel = part.numel()
    return [numel * index // pieces for index in range(pieces + 1)]


def _exchange(
    link: Link,
    part: torch.Tensor,
    tag: int,
    scratch: Scratch,
    combine: Callable[[torch.Tensor, Sequence[torch.Tensor]], None],
) -> Run:
    buffers = {other: scratch.take(part.numel()) for other in _others(link)}
    handles = {other: link.receive(buffer, other, tag) for other, buffer in buffers.items()}
    yield
    for other in buffers:
        link.send(part, other, tag)
    for other, handle in handles.items():
        link.wait(handle, other)
    link.flush()  # the own part is about to be overwritten
    combine(part, [buffers.get(position, part) for position in range(link.size)])


def _sum_in_order(out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """Write the sum of `terms` to `out`, which may be one of them; half precision is summed in float32."""
    total = terms[0].to(torch.float32) if out.element_size() == 2 else terms[0].clone()
    for term in terms[1:]:
        total.add_(term)
    out.copy_(total)


def _maximum(out: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    for term in terms:
        torch.maximum(out, term, out=out)


def _others(link: Link) -> list[int]:
    """The other positions, nearest to the right first, so that no two ranks begin with the same receiver."""
    return [(link.position + hop) % link.size for hop in range(1, link.size)]


def _segments(part: torch.Tensor, segment_bytes: int) -> list[torch.Tensor]:
    """Equal pieces of about `segment_bytes`, at most 16: each costs Python time, and more hide no more."""
    count = part.numel() * part.element_size() // segment_bytes
    return split(part, min(count, _MAX_SEGMENTS)) if count > 1 else [part]


def _position(place: int, extra: int) -> int:
    """Position on the axis of a place in the power-of-two core of halving-doubling."""
    return 2 * place if place < extra else place + extra
