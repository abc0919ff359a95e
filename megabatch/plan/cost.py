"""Seconds of an all-reduce on a cluster: the phases of `comm.phases`, the links they cross, the prices of
`comm.price`.

A phase advances in rounds; a round lasts as long as its busiest link needs for the transfers that share it, plus
the latency of the longest path, plus the software latency of one message. `topology` counts the transfers, this
file turns counts and rates into the latency and rate of a hop, and `comm.price` does the rest, so that planning,
choosing at run time and measuring speak of one price. A cluster with a `calibration` (measured axes) is priced by
that instead.

All of this is a straight line in the bytes of the message: latency + bytes / rate. So an algorithm on a grid is
priced once, as a `Curve`, and each bucket costs an addition.

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

from megabatch.comm.calibration import predictions
from megabatch.comm.phases import ALGORITHMS, WORLD, Phase, Step, num_lanes, phases
from megabatch.comm.price import LinkCost, phase_seconds
from megabatch.comm.shape import GridShape
from megabatch.plan.cluster import Cluster, Network
from megabatch.plan.topology import Flows, count_crossings, count_peer_flows, count_ring_flows, count_swap_flows

__all__ = ["CLASSES", "AllReduce", "Curve", "Hop", "Line", "hop", "price_all_reduce", "price_curve", "price_swaps"]

CLASSES = ("worker link", "NIC", "rack uplink")
CHAIN_SEGMENTS = 16
_WHOLE = 1 << 62
_TREE_CHUNK_BYTES = 512 * 1024
_SIZES = (float(1 << 24), float(1 << 25))


@dataclass(frozen=True, slots=True)
class Hop:
    """One round of a phase: latency of the longest path, and seconds per byte of a transfer, by class of link."""

    latency_seconds: float
    seconds_per_byte: tuple[float, float, float]

    @property
    def binding(self) -> int:
        """Index of the class of link that decides how long the bytes take."""
        return self.seconds_per_byte.index(max(self.seconds_per_byte))


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as latency + bytes * the sum of `per_byte`, which is told by the class of link that binds."""

    latency_seconds: float
    per_byte: tuple[float, float, float]

    def seconds(self, message_bytes: float) -> float:
        return self.latency_seconds + message_bytes * sum(self.per_byte)

    def plus(self, other: Line) -> Line:
        """One after the other."""
        a, b = self.per_byte, other.per_byte
        return Line(self.latency_seconds + other.latency_seconds, (a[0] + b[0], a[1] + b[1], a[2] + b[2]))


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Seconds of one all-reduce, and what they consist of: "latency" and the classes of links that bind."""

    seconds: float
    parts: Mapping[str, float]

    @property
    def binding(self) -> str:
        """What takes most of the time."""
        return max(self.parts, key=lambda name: self.parts[name]) if self.parts else "nothing"


@dataclass(frozen=True, slots=True)
class Curve:
    """The price of an algorithm on a grid: the largest of its lines (lanes side by side), or the least (a choice)."""

    lines: tuple[Line, ...]
    choice: bool = False

    def at(self, message_bytes: float) -> AllReduce:
        """The price of one message."""
        if not self.lines:
            return AllReduce(0.0, {})
        pick = min if self.choice else max
        line = pick(self.lines, key=lambda one: one.seconds(message_bytes))
        parts = {name: part * message_bytes for name, part in zip(CLASSES, line.per_byte, strict=True)}
        return AllReduce(line.seconds(message_bytes), {"latency": line.latency_seconds, **parts})


def price_all_reduce(cluster: Cluster, algorithm: str, shape: GridShape, message_bytes: float) -> AllReduce:
    """Seconds of one message on the grid `shape`, whose ranks fill the nodes of the cluster in order.

    Raises:
        ConfigError: the algorithm is unknown, or the cluster's measurement says nothing about this grid.
    """
    if cluster.calibration is None:
        return price_curve(cluster.network, algorithm, shape).at(message_bytes)
    if algorithm not in ALGORITHMS:
        phases(algorithm, shape)  # says which are known
    ranked = {one.algorithm: one.seconds for one in predictions(cluster.calibration, shape, message_bytes)}
    tiny = {one.algorithm: one.seconds for one in predictions(cluster.calibration, shape, 1)}
    latency = min(ranked[algorithm], tiny[algorithm])
    return AllReduce(ranked[algorithm], {"latency": latency, "NIC": ranked[algorithm] - latency})


@lru_cache(maxsize=65536)
def price_curve(network: Network, algorithm: str, shape: GridShape, chain_segments: int = CHAIN_SEGMENTS) -> Curve:
    """The price of an algorithm on a grid, for any message."""
    phase_list = phases(algorithm, shape)
    lanes = [Line(0.0, (0.0, 0.0, 0.0))] * num_lanes(phase_list)
    busy = [0.0, 0.0, 0.0]
    for phase in phase_list:
        line, load = _price_phase(network, phase, shape, chain_segments)
        lanes[phase.lane] = lanes[phase.lane].plus(line)
        busy = [one + other for one, other in zip(busy, load, strict=True)]
    if len(lanes) > 1:
        # Lanes share the links: no class can be done before it has carried the bytes of all lanes.
        lanes += [Line(0.0, _only(index, seconds)) for index, seconds in enumerate(busy)]
    if algorithm == "backend" and network.collectives == "tree" and phase_list:
        return Curve((*lanes, _tree(network, shape.world_size)), choice=True)
    return Curve(tuple(lanes) if phase_list else ())


def hop(network: Network, flows: Flows) -> Hop:
    """What a round costs in which these transfers share the links."""
    latency = network.software_latency + 2 * network.worker_latency
    nic = rack = 0.0
    if flows.nic:
        latency += 2 * network.nic_latency
        nic = flows.nic / network.nic_rate
    if flows.rack:
        latency += 2 * network.rack_latency
        rack = flows.rack / network.rack_rate
    return Hop(latency, (flows.port / network.worker_rate, nic, rack))


def price_swaps(network: Network, world_size: int, steps: Iterable[Step]) -> Line:
    """Steps in which ranks swap with a partner at the step's own distance: as `halving_doubling` does, in any order."""
    total = Line(0.0, (0.0, 0.0, 0.0))
    for step in steps:
        flows = count_swap_flows(world_size, step.distance, network.workers_per_node, network.nodes_per_rack)
        cost = hop(network, flows)
        per_byte = step.count * float(step.share) * max(cost.seconds_per_byte)
        total = total.plus(Line(step.count * cost.latency_seconds, _only(cost.binding, per_byte)))
    return total


def _price_phase(
    network: Network, phase: Phase, shape: GridShape, chain_segments: int
) -> tuple[Line, tuple[float, ...]]:
    """The line of a phase, and the seconds per byte of the message that each class of link is busy with it."""
    if phase.pattern == "halving":
        swaps = price_swaps(network, shape.world_size, phase.steps())
        return swaps, swaps.per_byte
    stride = 1 if phase.axis == WORLD else math.prod(shape.sizes[phase.axis + 1 :])
    if phase.pattern == "chain":
        return _price_chain(network, phase, shape.world_size, stride, chain_segments)
    layout = (shape.world_size, stride, phase.size, network.workers_per_node, network.nodes_per_rack)
    if phase.pattern == "direct":
        cost = hop(network, count_peer_flows(*layout))
        rate, overhead = (phase.size - 1) / max(cost.seconds_per_byte), network.software_latency
    else:
        cost = hop(network, count_ring_flows(*layout, leaders=phase.leaders))
        rate, overhead = 1 / max(cost.seconds_per_byte), cost.latency_seconds
    # One axis of its own, whose cost holds what the counting found: sharing is in the rate already.
    alone, axis = dataclasses.replace(phase, axis=0, leaders=False), GridShape((phase.size,))
    link = (LinkCost(cost.latency_seconds, rate, overhead),)
    line = _line(alone, axis, link, cost.binding)
    busy = sum(line.per_byte) / max(cost.seconds_per_byte)
    return line, tuple(busy * one for one in cost.seconds_per_byte)


def _price_chain(
    network: Network, phase: Phase, world_size: int, stride: int, segments: int
) -> tuple[Line, tuple[float, ...]]:
    """Segments move on hop by hop: each hop once, and its slowest once more for every further segment.

    So hops that leave the node, if there are any, are one chain of all segments, and those inside it one of a single
    segment.
    """
    layout = (world_size, stride, phase.size, network.workers_per_node)
    slow = count_crossings(*layout)
    flows = count_ring_flows(*layout, network.nodes_per_rack, leaders=phase.leaders, closed=False)
    total = Line(0.0, (0.0, 0.0, 0.0))
    for hops, cost, count in (
        (slow, hop(network, flows), segments),
        (phase.size - 1 - slow, hop(network, Flows(1, 0, 0)), 1 if slow else segments),
    ):
        if hops:
            share = phase.share if count > 1 else phase.share / segments
            part = dataclasses.replace(phase, axis=0, leaders=False, size=hops + 1, share=share)
            link = (LinkCost(cost.latency_seconds, 1 / max(cost.seconds_per_byte), cost.latency_seconds),)
            total = total.plus(_line(part, GridShape((hops + 1,)), link, cost.binding, count))
    return total, total.per_byte


def _line(phase: Phase, axis: GridShape, link: tuple[LinkCost, ...], binding: int, segments: int = 1) -> Line:
    """The price of a phase on an axis of its own at two sizes, as a line."""
    segment = float(phase.share) / segments if segments > 1 else 0.0
    low, high = (phase_seconds(phase, axis, link, size, int(segment * size) or _WHOLE) for size in _SIZES)
    per_byte = (high - low) / (_SIZES[1] - _SIZES[0])
    return Line(low - per_byte * _SIZES[0], _only(binding, per_byte))


def _tree(network: Network, world_size: int) -> Line:
    per_node = min(network.workers_per_node, world_size)
    nodes = -(-world_size // per_node)
    racks = -(-nodes // network.nodes_per_rack) if network.nodes_per_rack else 1
    inside = hop(network, Flows(1, 0, 0))
    across = hop(network, Flows(1, 1 if nodes > 1 else 0, 1 if racks > 1 else 0))
    depth = math.ceil(math.log2(nodes)) if nodes > 1 else 0
    filling = _TREE_CHUNK_BYTES * max(across.seconds_per_byte)
    latency = 2 * (depth * (across.latency_seconds + filling) + (per_node - 1) * inside.latency_seconds)
    return Line(latency, _only(across.binding, 2 * max(across.seconds_per_byte)))


def _only(index: int, value: float) -> tuple[float, float, float]:
    return (value if index == 0 else 0.0, value if index == 1 else 0.0, value if index == 2 else 0.0)
