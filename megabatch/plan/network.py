"""Seconds of an all-reduce on a network of nodes and racks: the phases of `comm.phases`, the links they cross, the
prices of `comm.price`.

    worker --port-- node --NIC-- rack switch --uplink-- the other racks

A phase advances in rounds; a round lasts as long as its busiest link needs for the transfers that share it, plus
the latency of the longest path, plus the software latency of one message. Counted transfers and rates make the latency
and rate of a hop; `comm.price` does the rest, as it does for choosing at run time and for measuring. The price is a
straight line in the bytes of the message, so an algorithm on a grid is priced once, as a `Curve`.

Ranks fill nodes, nodes fill racks, in order. A hop along an axis of a grid goes `stride` ranks on. For every node
and every rack the transfers that leave and enter are counted; the busiest one binds. Worked example, 4 workers a
node, grid 8x8: along the row (stride 1) one of four workers sends to the next node, so a NIC carries 1 transfer;
along the column (stride 8) all four do, so it carries 4, and each gets a quarter of the NIC. Worlds of more than
`_MAX_COUNTED` ranks are counted on their first ranks only, whole lines of the axis and whole racks as far as they fit.

The backend's own all-reduce is not known from outside. Where the cluster file says `collectives = "tree"` it is the
better of a flat ring and a pipelined double binary tree: 2 log2(nodes) latencies and fillings, and twice the
message through every NIC. That formula is rough, and a prediction that uses it says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megabatch.comm.phases import WORLD, Phase, RoundGroup, num_channels, phases
from megabatch.comm.price import CHAIN_SEGMENTS, UNCUT_BYTES, LinkCost, phase_seconds
from megabatch.comm.shape import GridShape

_CLASSES = ("worker link", "NIC", "rack uplink")
_MAX_COUNTED = 1 << 16
_TREE_CHUNK_BYTES = 512 * 1024
_SIZES = (float(1 << 24), float(1 << 25))

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a `Cluster` alone, bytes per second and seconds: what the price of an all-reduce depends on.

    collectives: what the backend's own all-reduce is taken for, "ring" or "tree". nodes_per_rack 0: one fabric.
    """

    workers_per_node: int
    nodes_per_rack: int
    worker_rate: float
    worker_latency: float
    nic_rate: float
    nic_latency: float
    software_latency: float
    collectives: str
    rack_rate: float = math.inf
    rack_latency: float = 0.0


@dataclass(frozen=True, slots=True)
class _Hop:
    """One round of a phase: latency of the longest path, and seconds per byte of a transfer, by class of link."""

    latency_seconds: float
    seconds_per_byte: tuple[float, float, float]

    @property
    def slowest(self) -> float:
        """Seconds per byte on the link that decides how long the bytes take."""
        return max(self.seconds_per_byte)

    @property
    def binding(self) -> int:
        """Index of the class of that link."""
        return self.seconds_per_byte.index(self.slowest)


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as latency + bytes * the sum of `per_byte`, with one value for each class of link that binds."""

    latency_seconds: float
    per_byte: tuple[float, float, float]

    def seconds(self, message_bytes: float) -> float:
        return self.latency_seconds + message_bytes * sum(self.per_byte)

    def __add__(self, other: Line) -> Line:
        """One after the other."""
        a, b = self.per_byte, other.per_byte
        return Line(self.latency_seconds + other.latency_seconds, (a[0] + b[0], a[1] + b[1], a[2] + b[2]))


_NOTHING = Line(0.0, (0.0, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Seconds of one all-reduce, and what they consist of: "latency" and the classes of links that bind."""

    seconds: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """The price of an algorithm on a grid: the largest of its lines (channels in parallel), or the least (a choice)."""

    lines: tuple[Line, ...]
    choice: bool = False

    def at(self, message_bytes: float) -> AllReduce:
        """The price of one message."""
        if not self.lines:
            return AllReduce(0.0, {})
        pick = min if self.choice else max
        line = pick(self.lines, key=lambda one: one.seconds(message_bytes))
        parts = {name: part * message_bytes for name, part in zip(_CLASSES, line.per_byte, strict=True)}
        return AllReduce(line.seconds(message_bytes), {"latency": line.latency_seconds, **parts})


@lru_cache(maxsize=65536)
def price_curve(network: Network, algorithm: str, shape: GridShape, segments: int = CHAIN_SEGMENTS) -> Curve:
    """The price of an algorithm on a grid, for any message."""
    phase_list = phases(algorithm, shape)
    channels = [_NOTHING] * num_channels(phase_list)
    busy = [0.0, 0.0, 0.0]
    for phase in phase_list:
        line, load = _price_phase(network, phase, shape, segments)
        channels[phase.channel] += line
        busy = [one + other for one, other in zip(busy, load, strict=True)]
    if len(channels) > 1:
        # Channels share the links: no class can be done before it has carried the bytes of all channels.
        channels += [Line(0.0, _only(index, seconds)) for index, seconds in enumerate(busy)]
    if algorithm == "backend" and network.collectives == "tree" and phase_list:
        return Curve((*channels, _tree(network, shape.world_size)), choice=True)
    return Curve(tuple(channels) if phase_list else ())


def _hop(network: Network, flows: Flows) -> _Hop:
    """What a round costs in which these transfers share the links."""
    latency = network.software_latency + 2 * network.worker_latency
    latency += 2 * network.nic_latency if flows.nic else 0.0
    latency += 2 * network.rack_latency if flows.rack else 0.0
    times = (flows.port / network.worker_rate, flows.nic / network.nic_rate, flows.rack / network.rack_rate)
    return _Hop(latency, times)


def price_swaps(network: Network, world_size: int, steps: Iterable[RoundGroup]) -> Line:
    """Steps in which ranks swap with a partner at the step's own distance: as `halving_doubling` does, in any order."""
    total = _NOTHING
    for step in steps:
        flows = count_swap_flows(world_size, step.distance, network.workers_per_node, network.nodes_per_rack)
        cost = _hop(network, flows)
        per_byte = step.count * float(step.share) * cost.slowest
        total += Line(step.count * cost.latency_seconds, _only(cost.binding, per_byte))
    return total


def _price_phase(network: Network, phase: Phase, shape: GridShape, segments: int) -> tuple[Line, tuple[float, ...]]:
    """The line of a phase, and the seconds per byte of the message that each class of link is busy with it."""
    if phase.pattern == "halving":
        line = price_swaps(network, shape.world_size, phase.steps())
        return line, line.per_byte
    stride = 1 if phase.axis == WORLD else shape.stride(phase.axis)
    if phase.pattern == "chain":
        return _price_chain(network, phase, shape.world_size, stride, segments)
    layout = (shape.world_size, stride, phase.size, network.workers_per_node, network.nodes_per_rack)
    if phase.pattern == "direct":
        cost = _hop(network, count_peer_flows(*layout))
        rate, overhead = (phase.size - 1) / cost.slowest, network.software_latency
    else:
        cost = _hop(network, count_ring_flows(*layout, leaders=phase.leaders))
        rate, overhead = 1 / cost.slowest, cost.latency_seconds
    # One axis of its own, whose cost holds what the counting found: sharing is in the rate already.
    line = _line(phase, LinkCost(cost.latency_seconds, rate, overhead), cost.binding)
    busy = sum(line.per_byte) / cost.slowest
    return line, tuple(busy * one for one in cost.seconds_per_byte)


def _price_chain(
    network: Network, phase: Phase, world_size: int, stride: int, segments: int
) -> tuple[Line, tuple[float, ...]]:
    """Segments move on hop by hop: each hop once, and its slowest once more for every further segment.

    So hops that leave the node, if any, are one chain of all segments, and those inside it one of a single segment.
    """
    layout = (world_size, stride, phase.size, network.workers_per_node)
    slow = count_crossings(*layout)
    flows = count_ring_flows(*layout, network.nodes_per_rack, leaders=phase.leaders, closed=False)
    total = _NOTHING
    for hops, cost, count in (
        (slow, _hop(network, flows), segments),
        (phase.size - 1 - slow, _hop(network, Flows(1, 0, 0)), 1 if slow else segments),
    ):
        if hops:
            share = phase.share if count > 1 else phase.share / segments
            part = dataclasses.replace(phase, size=hops + 1, share=share)
            link = LinkCost(cost.latency_seconds, 1 / cost.slowest, cost.latency_seconds)
            total += _line(part, link, cost.binding, count)
    return total, total.per_byte


def _line(phase: Phase, link: LinkCost, binding: int, segments: int = 1) -> Line:
    """The price of a phase on an axis of its own at two sizes, as a line."""
    alone, axis = dataclasses.replace(phase, axis=0, leaders=False), GridShape((phase.size,))
    segment = float(phase.share) / segments if segments > 1 else 0.0
    low, high = (phase_seconds(alone, axis, (link,), size, int(segment * size) or UNCUT_BYTES) for size in _SIZES)
    per_byte = (high - low) / (_SIZES[1] - _SIZES[0])
    return Line(low - per_byte * _SIZES[0], _only(binding, per_byte))


def _tree(network: Network, world_size: int) -> Line:
    """The pipelined double binary tree of a backend."""
    per_node = min(network.workers_per_node, world_size)
    nodes = -(-world_size // per_node)
    racks = -(-nodes // network.nodes_per_rack) if network.nodes_per_rack else 1
    inside = _hop(network, Flows(1, 0, 0))
    across = _hop(network, Flows(1, 1 if nodes > 1 else 0, 1 if racks > 1 else 0))
    depth = math.ceil(math.log2(nodes)) if nodes > 1 else 0
    filling = _TREE_CHUNK_BYTES * across.slowest
    latency = 2 * (depth * (across.latency_seconds + filling) + (per_node - 1) * inside.latency_seconds)
    return Line(latency, _only(across.binding, 2 * across.slowest))


def _only(index: int, value: float) -> tuple[float, float, float]:
    """The value at one class of link, 0 at the others."""
    return (value if index == 0 else 0.0, value if index == 1 else 0.0, value if index == 2 else 0.0)


@dataclass(frozen=True, slots=True)
class Flows:
    """Transfers of one step that share the busiest link of each class; 0: none crosses it.

    port: out of one worker. nic, rack: in or out of one node or rack, whichever is more.
    """

    port: int
    nic: int
    rack: int


@lru_cache(maxsize=65536)
def count_ring_flows(
    world_size: int,
    stride: int,
    size: int,
    workers_per_node: int,
    nodes_per_rack: int,
    *,
    leaders: bool = False,
    closed: bool = True,
) -> Flows:
    """Every rank sends to the next along the axis, the last to the first unless the line is not `closed`.

    With `leaders` only those at position 0 of the faster axes take part.
    """
    block = stride * size
    ranks = _ranks(world_size, block)
    along = ranks % block // stride
    keep = np.ones(len(ranks), dtype=bool) if closed else along < size - 1
    if leaders:
        keep &= ranks % stride == 0
    targets = ranks + np.where(along == size - 1, -(size - 1) * stride, stride)
    return _count(ranks[keep], targets[keep], workers_per_node, nodes_per_rack)


@lru_cache(maxsize=65536)
def count_swap_flows(world_size: int, distance: int, workers_per_node: int, nodes_per_rack: int) -> Flows:
    """Ranks swap with the partner whose number differs in the bit `distance`, as in halving-doubling."""
    ranks = _ranks(world_size, 2 * distance)
    partners = ranks ^ distance
    inside = partners < world_size
    return _count(ranks[inside], partners[inside], workers_per_node, nodes_per_rack)


@lru_cache(maxsize=65536)
def count_peer_flows(world_size: int, stride: int, size: int, workers_per_node: int, nodes_per_rack: int) -> Flows:
    """Every rank sends to all other positions of its axis at once."""
    block = stride * size
    ranks = _ranks(world_size, block)
    lines = ranks // block * stride + ranks % stride
    nic = _leaving(lines, ranks // workers_per_node, size)
    rack = _leaving(lines, ranks // (workers_per_node * nodes_per_rack), size) if nodes_per_rack else 0
    return Flows(size - 1, nic, rack)


@lru_cache(maxsize=65536)
def count_crossings(world_size: int, stride: int, size: int, workers_per_node: int) -> int:
    """The most hops of one line, from its first position to its last, that leave a node."""
    ranks = _ranks(world_size, stride * size)
    inner = ranks[ranks % (stride * size) // stride < size - 1]
    leaves = inner // workers_per_node != (inner + stride) // workers_per_node
    lines = inner // (stride * size) * stride + inner % stride
    return int(np.bincount(lines, weights=leaves).max()) if len(inner) else 0


def _ranks(world_size: int, block: int) -> Ints:
    if world_size <= _MAX_COUNTED:
        return np.arange(world_size)
    return np.arange(min(world_size, max(block, _MAX_COUNTED // block * block), 4 * _MAX_COUNTED))


def _count(sources: Ints, targets: Ints, workers_per_node: int, nodes_per_rack: int) -> Flows:
    nic = _busiest(sources // workers_per_node, targets // workers_per_node)
    per_rack = workers_per_node * nodes_per_rack
    return Flows(1, nic, _busiest(sources // per_rack, targets // per_rack) if nodes_per_rack else 0)


def _busiest(sources: Ints, targets: Ints) -> int:
    """The most transfers that leave, or enter, one group."""
    crossing = sources != targets
    if not crossing.any():
        return 0
    # Numbers count from the least one: in a large world the first ranks send to groups far away.
    groups = (sources[crossing], targets[crossing])
    return int(max(np.bincount(one - one.min()).max() for one in groups))


def _leaving(lines: Ints, groups: Ints, size: int) -> int:
    """The most transfers out of one group when each member of a line sends to every other member."""
    pairs, members = np.unique(groups * (int(lines.max()) + 1) + lines, return_counts=True)
    out = np.bincount(pairs // (int(lines.max()) + 1), weights=members * (size - members))
    return int(out.max())
