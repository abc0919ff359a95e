"""Counted transfers against a walk over every single rank."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise

import pytest

from megabatch.plan.topology import Flows, count_crossings, count_peer_flows, count_ring_flows, count_swap_flows


def walk(pairs: list[tuple[int, int]], per_node: int, per_rack: int) -> tuple[int, int]:
    """Most transfers into or out of one node, and of one rack."""
    most = []
    for group in (per_node, per_node * per_rack):
        out, into = Counter[int](), Counter[int]()
        for source, target in pairs:
            if source // group != target // group:
                out[source // group] += 1
                into[target // group] += 1
        most.append(max([0, *out.values(), *into.values()]))
    return most[0], most[1]


def lines(world_size: int, stride: int, size: int) -> list[list[int]]:
    starts = [r for r in range(world_size) if r % (stride * size) // stride == 0]
    return [[start + stride * along for along in range(size)] for start in starts]


@pytest.mark.parametrize(
    ("world_size", "stride", "size", "per_node", "per_rack"),
    [(64, 1, 8, 4, 3), (64, 8, 8, 4, 3), (48, 6, 8, 4, 5), (60, 1, 60, 8, 2), (72, 3, 4, 4, 2), (7, 1, 7, 4, 1)],
)
def test_rings_and_peers(world_size: int, stride: int, size: int, per_node: int, per_rack: int) -> None:
    axis = lines(world_size, stride, size)
    ring = [(line[i], line[(i + 1) % size]) for line in axis for i in range(size)]
    nic, rack = walk(ring, per_node, per_rack)
    assert count_ring_flows(world_size, stride, size, per_node, per_rack) == Flows(1, nic, rack)
    peers = [(one, other) for line in axis for one in line for other in line if one != other]
    nic, rack = walk(peers, per_node, per_rack)
    assert count_peer_flows(world_size, stride, size, per_node, per_rack) == Flows(size - 1, nic, rack)


@pytest.mark.parametrize("distance", [1, 2, 4, 8, 16, 32])
def test_swaps(distance: int) -> None:
    pairs = [(rank, rank ^ distance) for rank in range(50) if rank ^ distance < 50]
    nic, rack = walk(pairs, 4, 3)
    assert count_swap_flows(50, distance, 4, 3) == Flows(1, nic, rack)


@pytest.mark.parametrize(("stride", "size"), [(1, 8), (2, 6), (1, 3), (5, 4), (1, 1)])
def test_crossings(stride: int, size: int) -> None:
    walked = [sum(a // 4 != b // 4 for a, b in pairwise(line)) for line in lines(stride * size * 3, stride, size)]
    assert count_crossings(stride * size * 3, stride, size, 4) == max(walked)


def test_leaders_send_alone() -> None:
    assert count_ring_flows(64, 4, 16, 4, 0, leaders=True) == Flows(1, 1, 0)
    assert count_ring_flows(64, 4, 16, 4, 0) == Flows(1, 4, 0)


def test_a_million_ranks_are_counted_at_once() -> None:
    assert count_ring_flows(1_000_000, 1000, 1000, 8, 0) == Flows(1, 8, 0)
    assert count_ring_flows(1_000_000, 1, 1_000_000, 8, 0) == Flows(1, 1, 0)


def test_far_groups_take_no_room() -> None:
    """A step of half a billion ranks: the groups it ends in have large numbers, but are few."""
    tracemalloc.start()
    assert count_ring_flows(1_000_000_000, 500_000_000, 2, 8, 4) == Flows(1, 8, 32)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
