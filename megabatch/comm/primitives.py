"""Reduce-scatter, all-gather and relatives on Gloo, with receives posted ahead and large parts sent in
segments.

Why own ones: Gloo's reduce-scatter is an all-reduce inside (twice the bytes), and a Gloo message whose
receive is not yet posted costs a round trip instead of one way, because sender and receiver first agree that
both are ready.

Each primitive is a generator that goes round for ever: it posts all its receives and yields, then runs once
and yields. The caller posts every primitive of an all-reduce before it runs the first, so that all but the
first message go one way; and it may post the next round as soon as one is over, so that even the first does.
What can be worked out once - which views, which buffers - is worked out before the first round.

A part arrives in place only when its sender must have seen this rank's copy before - the sum contains it -
hence no receive posted early can overwrite data that still has to be sent.

Sums: ring, halving and chain add what arrives to the own part, rounding once per hop; with half precision
torch adds in float32 and rounds the result. `direct` and `exchange` hold all terms at once: half precision is
summed in float32 and rounded once. The order of terms is fixed, so results repeat bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence

import torch

from megabatch.comm.p2p import Link, Scratch
from megabatch.comm.phases import halving_core
from megabatch.comm.price import CHAIN_SEGMENTS, RING_SEGMENTS

Run = Generator[None, None, None]
Primitive = Callable[[Link, torch.Tensor, int, Scratch, int], Run]
"""(link, part of the message, tag, scratch, segment bytes) -> generator: posts, yields, runs, yields, posts, ..."""


def split(part: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """Cut a 1-D tensor into `pieces` views whose lengths differ by at most one; every rank cuts alike."""
    bounds = _bounds(part, pieces)
    return [part[low:high] for low, high in itertools.pairwise(bounds)]


def ring_reduce_scatter(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `split(part, size)[position]` over the axis, in size - 1 hops to the right."""
    size, me = link.size, link.position
    left, right = (me - 1) % size, (me + 1) % size
    chunks = split(part, size)
    first = _segments(chunks[left], segment_bytes)
    arriving = [
        (own, scratch.take(own.numel()), step < size - 1)
        for step in range(1, size)
        for own in _segments(chunks[(me - 1 - step) % size], segment_bytes)
    ]
    while True:
        handles = [link.receive(buffer, left, tag) for _, buffer, _ in arriving]
        yield
        for own in first:
            link.send(own, right, tag)
        for (own, buffer, goes_on), handle in zip(arriving, handles, strict=True):
            link.wait(handle, left)
            own.add_(buffer)
            if goes_on:
                link.send(own, right, tag)
        yield


def ring_all_gather(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Fill `part` from each position's own chunk, in size - 1 hops to the right."""
    size, me = link.size, link.position
    left, right = (me - 1) % size, (me + 1) % size
    chunks = split(part, size)
    first = _segments(chunks[me], segment_bytes)
    arriving = [
        (other, step < size - 1)
        for step in range(1, size)
        for other in _segments(chunks[(me - step) % size], segment_bytes)
    ]
    while True:
        handles = [link.receive(other, left, tag) for other, _ in arriving]
        yield
        for own in first:
            link.send(own, right, tag)
        for (other, goes_on), handle in zip(arriving, handles, strict=True):
            link.wait(handle, left)
            if goes_on:
                link.send(other, right, tag)
        yield


def direct_reduce_scatter(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `split(part, size)[position]` over the axis in one hop: everybody sends each owner its chunk."""
    chunks = split(part, link.size)
    return _combine_all(link, chunks[link.position], chunks, tag, scratch, _sum_in_order)


def direct_all_gather(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Fill `part` from each position's own chunk in one hop: every owner sends to everybody."""
    chunks = split(part, link.size)
    others = _others(link)
    while True:
        handles = [(other, link.receive(chunks[other], other, tag)) for other in others]
        yield
        for other in others:
            link.send(chunks[link.position], other, tag)
        for other, handle in handles:
            link.wait(handle, other)
        yield


def exchange(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `part` over the axis in one hop: everybody sends everything to everybody."""
    return _combine_all(link, part, [part] * link.size, tag, scratch, _sum_in_order)


def exchange_maximum(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Like `exchange`, taking the greatest instead of the sum."""
    return _combine_all(link, part, [part] * link.size, tag, scratch, _maximum)


def halving_all_reduce(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `part` over the axis by recursive halving, then doubling; extra ranks fold into a partner."""
    core, extra = halving_core(link.size)
    me = link.position
    paired = me < 2 * extra
    while paired and me % 2 == 1:
        handle = link.receive(part, me - 1, tag)
        yield
        link.send(part, me - 1, tag)
        link.wait(handle, me - 1)
        yield
    place = me // 2 if paired else me - extra
    fold = scratch.take(part.numel()) if paired else None
    bounds = _bounds(part, core)
    low, high, distance = 0, core, core // 2
    halves: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    while distance:
        partner = _position(place ^ distance, extra)
        middle = low + distance
        keep, give = ((low, middle), (middle, high)) if place < middle else ((middle, high), (low, middle))
        kept, given = (part[bounds[start] : bounds[end]] for start, end in (keep, give))
        halves.append((partner, kept, given, scratch.take(kept.numel())))
        (low, high), distance = keep, distance // 2
    while True:
        folded = link.receive(fold, me + 1, tag) if fold is not None else None
        arriving = [link.receive(buffer, partner, tag) for partner, _, _, buffer in halves]
        # Posted after the halves: between the same two ranks, messages match in the order posted.
        returning = [link.receive(given, partner, tag) for partner, _, given, _ in reversed(halves)]
        yield
        if fold is not None:
            link.wait(folded, me + 1)
            part.add_(fold)
        for (partner, kept, given, buffer), handle in zip(halves, arriving, strict=True):
            link.send(given, partner, tag)
            link.wait(handle, partner)
            kept.add_(buffer)
        for (partner, kept, _, _), handle in zip(reversed(halves), returning, strict=True):
            link.send(kept, partner, tag)
            link.wait(handle, partner)
        if fold is not None:
            link.send(part, me + 1, tag)
        link.flush()  # all of the part is under way, and whoever runs this may divide it next
        yield


def chain_reduce(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Sum `part` over the axis at position 0, from the last position down, segment by segment."""
    me, last = link.position, link.size - 1
    segments = _segments(part, segment_bytes, CHAIN_SEGMENTS)
    buffers = [scratch.take(segment.numel()) for segment in segments] if me < last else []
    while True:
        handles = [link.receive(buffer, me + 1, tag) for buffer in buffers]
        yield
        for index, segment in enumerate(segments):
            if me < last:
                link.wait(handles[index], me + 1)
                segment.add_(buffers[index])
            if me > 0:
                link.send(segment, me - 1, tag)
        yield


def chain_broadcast(link: Link, part: torch.Tensor, tag: int, scratch: Scratch, segment_bytes: int) -> Run:
    """Copy position 0's `part` to every position, from the first up, segment by segment."""
    me, last = link.position, link.size - 1
    segments = _segments(part, segment_bytes, CHAIN_SEGMENTS)
    while True:
        handles = [link.receive(segment, me - 1, tag) for segment in segments] if me > 0 else []
        yield
        for index, segment in enumerate(segments):
            if me > 0:
                link.wait(handles[index], me - 1)
            if me < last:
                link.send(segment, me + 1, tag)
        yield


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


def _combine_all(
    link: Link,
    own: torch.Tensor,
    given: Sequence[torch.Tensor],
    tag: int,
    scratch: Scratch,
    combine: Callable[[torch.Tensor, Sequence[torch.Tensor]], None],
) -> Run:
    """Send `given[other]` to every other position, and combine what they send with `own`, in order of position."""
    buffers = {other: scratch.take(own.numel()) for other in _others(link)}
    terms = [buffers.get(position, own) for position in range(link.size)]
    sends_own = any(given[other] is own for other in buffers)
    while True:
        handles = [(other, link.receive(buffer, other, tag)) for other, buffer in buffers.items()]
        yield
        for other in buffers:
            link.send(given[other], other, tag)
        for other, handle in handles:
            link.wait(handle, other)
        if sends_own:
            link.flush()  # it is about to be overwritten
        combine(own, terms)
        yield


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


def _segments(part: torch.Tensor, segment_bytes: int, most: int = RING_SEGMENTS) -> list[torch.Tensor]:
    """Equal pieces of at least `segment_bytes`: each costs a message.

    In a ring all links are busy in every step, and two pieces hide the latency: one is under way while the other is
    added and sent on. A chain is filled and emptied piece by piece, so there more are better.
    """
    count = part.numel() * part.element_size() // segment_bytes
    return split(part, min(count, most)) if count > 1 else [part]


def _position(place: int, extra: int) -> int:
    """Position on the axis of a place in the power-of-two core of halving-doubling."""
    return 2 * place if place < extra else place + extra
