"""Seconds that an all-reduce takes, from its phases and from the latency and rate of each axis. Imports no torch.

With S bytes in the message, a phase moves chunks of c = share * S (ring and direct: divided by the ranks of the axis).
Chunks of rings and chains travel as k segments of s = c / k. A link has latency a (tiny message, from send to arrival,
software included), overhead o (each further message of the same sender) and rate B. With n dependent steps:

    ring      (n - 1) * max(a + s/B, k*o + c/B)  +  a + c/B
    chain     n * (a + s/B)  +  (k - 1) * (o + s/B)
    direct    n * (a + (p - 1)*o + p*c/B)           p peers at once, `exchange` included
    halving   sum over its steps of a + c/B         each with its own c and distance

One segment makes the ring n * (a + c/B), the usual model. With several, a rank forwards the first segment while others
still arrive, so latency and bytes hide each other and the larger of the two counts per step.

Rates are shared: a link that serves q ranks gives each B / q while all of them send, as in the columns of a torus, and
B to a rank that sends alone: a leader, or the one rank of a host whose right neighbour in the flat ring lives on
another host. Ranks do not step in unison, so a flat ring of unequal links pays the *mean* latency of its hops, but the
bytes of its slowest link; of halving-doubling each step uses the axis that its distance spans.

Channels run side by side: the longest decides, unless one axis - or all, where they are one link: a host of one rank -
needs longer for the bytes of all channels. Staggered channels form a pipeline: the time of one channel, and for every
further one that of its bytes on the busiest axis.

Not modelled: the adding up (rates measured on whole collectives contain it), rounding of uneven chunks, and start
skew, which merely adds. "backend" is priced as our ring; measure it instead where possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.comm.phases import WORLD, Phase, RoundGroup, num_channels, staggered
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError

DEFAULT_SEGMENT_BYTES = 256 * 1024
UNCUT_BYTES = 2**62  # of a segment: chunks travel whole
RING_SEGMENTS = 2
CHAIN_SEGMENTS = 16
"""The most pieces in which a chunk travels: see `primitives`, which cuts them."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One axis of a grid: what a message along it costs.

    latency_seconds: a tiny message, one way, with its receive posted. bytes_per_second: one rank sending alone.
    message_overhead_seconds: each further message of the same sender. ranks_per_link: how many ranks divide the rate
    when all send at once; measured values need not be whole.
    """

    latency_seconds: float
    bytes_per_second: float
    message_overhead_seconds: float = 0.0
    ranks_per_link: float = 1.0

    def __post_init__(self) -> None:
        values = (self.latency_seconds, self.bytes_per_second, self.message_overhead_seconds, self.ranks_per_link)
        if not all(math.isfinite(value) for value in values) or min(values[0], values[2]) < 0 or values[1] <= 0:
            raise ConfigError(
                f"link cost {values} (latency, rate, overhead, sharing); give finite times and a rate > 0"
            )
        if self.ranks_per_link < 1:
            raise ConfigError(f"{self.ranks_per_link:g} ranks per link; give 1 when ranks do not share it, or more")

    def rate(self, *, alone: bool) -> float:
        """Bytes per second of one rank, when it sends alone or together with those that share its link."""
        return self.bytes_per_second if alone else self.bytes_per_second / self.ranks_per_link


@dataclass(frozen=True, slots=True)
class _LinkHop:
    """A kind of hop in a ring: its part of all hops, the link it uses, and the rate it gets there."""

    weight: float
    link: LinkCost
    rate: float


def all_reduce_seconds(
    phase_list: Sequence[Phase],
    shape: GridShape,
    links: Sequence[LinkCost],
    message_bytes: float,
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    *,
    one_link: bool = False,
) -> float:
    """Seconds of the whole phase list; `links[axis]` is the cost of that axis of `shape`.

    one_link: all axes leave through the same network card, so that channels on different axes share its rate.
    """
    pipeline = staggered(phase_list)  # of equal channels, their chunks whole
    channels = [0.0] * num_channels(phase_list)
    busy = [0.0] * len(shape.sizes)
    for phase in phase_list:
        segment = UNCUT_BYTES if pipeline else segment_bytes
        channels[phase.channel] += phase_seconds(phase, shape, links, message_bytes, segment)
        if phase.axis != WORLD:
            rate = links[phase.axis].rate(alone=phase.leaders)
            busy[phase.axis] += float(phase.sent_share()) * message_bytes / rate
    if len(channels) == 1:
        return channels[0]
    if pipeline:
        return channels[0] + (len(channels) - 1) * max(busy) / len(channels)
    return max(*channels, sum(busy) if one_link else max(busy))


def phase_seconds(
    phase: Phase,
    shape: GridShape,
    links: Sequence[LinkCost],
    message_bytes: float,
    segment_bytes: int = DEFAULT_SEGMENT_BYTES,
) -> float:
    """Seconds of one phase, by the formulas above."""
    if len(links) != len(shape.sizes):
        raise ConfigError(f"{len(links)} link costs for grid {shape.text}; give {len(shape.sizes)}, one per axis")
    if phase.size == 1:
        return 0.0
    if phase.pattern in ("ring", "backend", "chain"):
        return _segmented_seconds(phase, _hops(phase, shape, links), message_bytes, segment_bytes)
    return sum(_step_seconds(phase, step, shape, links, message_bytes) for step in phase.steps())


def _segmented_seconds(phase: Phase, hops: Sequence[_LinkHop], message_bytes: float, segment_bytes: int) -> float:
    """A ring or a chain, whose chunks travel in segments."""
    (step,) = phase.steps()
    is_chain = phase.pattern == "chain"
    chunk = float(step.share) * message_bytes
    most = CHAIN_SEGMENTS if is_chain else RING_SEGMENTS
    count = max(1, min(int(chunk // segment_bytes), most))  # as `primitives` cuts them
    move = sum(hop.weight * (hop.link.latency_seconds + chunk / count / hop.rate) for hop in hops)
    if is_chain:
        stay = max(hop.link.message_overhead_seconds + chunk / count / hop.rate for hop in hops)
        return step.count * move + (count - 1) * stay
    stay = max(count * hop.link.message_overhead_seconds + chunk / hop.rate for hop in hops)
    last = max(hop.link.latency_seconds + chunk / hop.rate for hop in hops)
    return (step.count - 1) * max(move, stay) + last


def _step_seconds(
    phase: Phase, step: RoundGroup, shape: GridShape, links: Sequence[LinkCost], message_bytes: float
) -> float:
    """Equal steps that use no segments: one message to each of `peers`."""
    axis = phase.axis if phase.axis != WORLD else _spanned_axis(shape, step.distance)
    link = links[axis]
    sent = step.peers * float(step.share) * message_bytes
    software = link.latency_seconds + (step.peers - 1) * link.message_overhead_seconds
    return step.count * (software + sent / link.rate(alone=phase.leaders))


def _hops(phase: Phase, shape: GridShape, links: Sequence[LinkCost]) -> list[_LinkHop]:
    """The kinds of hops from position to position + 1 along the axis of a phase."""
    if phase.axis != WORLD:
        link = links[phase.axis]
        return [_LinkHop(1.0, link, link.rate(alone=phase.leaders))]
    hops = []
    for axis in shape.axes:
        # Of all ranks in a row of ranks, those whose step to the next changes `axis` and nothing slower.
        slower = math.prod(shape.sizes[:axis])
        starts = slower * shape.sizes[axis] - (slower if axis > 0 and slower > 1 else 0)
        hops.append(_LinkHop(starts / shape.world_size, links[axis], links[axis].rate(alone=axis != shape.axes[-1])))
    return hops


def _spanned_axis(shape: GridShape, distance: int) -> int:
    """The slowest axis along which two ranks `distance` apart differ."""
    return next(axis for axis in shape.axes if shape.stride(axis) <= distance)
