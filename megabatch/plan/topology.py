"""Which links a phase crosses, and how many transfers share each: counted, not assumed.

Ranks fill nodes, nodes fill racks, in order. A hop along an axis of a grid goes `stride` ranks on. For every node
and every rack the transfers that leave and enter are counted; the busiest one binds. Worked example, 4 workers a
node, grid 8x8: along the row (stride 1) one of four workers sends to the next node, so a NIC carries 1 transfer;
along the column (stride 8) all four do, so it carries 4, and each gets a quarter of the NIC.

Worlds of more than `MAX_COUNTED` ranks are counted on their first ranks only, whole lines of the axis and whole
racks as far as they fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["MAX_COUNTED", "Flows", "count_crossings", "count_peer_flows", "count_ring_flows", "count_swap_flows"]

MAX_COUNTED = 1 << 16

Ints = np.ndarray[Any, np.dtype[np.int64]]


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
    if world_size <= MAX_COUNTED:
        return np.arange(world_size)
    return np.arange(min(world_size, max(block, MAX_COUNTED // block * block), 4 * MAX_COUNTED))


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
    ends = (ends[crossing] for ends in (sources, targets))
    return int(max(np.bincount(groups - groups.min()).max() for groups in ends))


def _leaving(lines: Ints, groups: Ints, size: int) -> int:
    """The most transfers out of one group when each member of a line sends to every other member."""
    pairs, members = np.unique(groups * (int(lines.max()) + 1) + lines, return_counts=True)
    out = np.bincount(pairs // (int(lines.max()) + 1), weights=members * (size - members))
    return int(out.max())
