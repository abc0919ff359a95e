"""Closed-form prices against stored results of SimGrid 3.32, an independent simulator, and against formulas by
hand.

simgrid.csv: 51.12 MB on nodes of 4 workers (50 GB/s ports, 1 us), one 23 GB/s NIC each (1.5 us), racks of 34 nodes
with 283 GB/s uplinks (1 us), network model CM02 without cross-traffic, ranks in lock-step, no software latency. The
leader of the hierarchical runs pipelines four segments; halving-doubling there starts with its nearest partner.
"""

from __future__ import annotations

import csv
import dataclasses
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint
from megabatch.comm.phases import ALGORITHMS, Phase, RoundGroup, phases
from megabatch.comm.price import all_reduce_seconds
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import ConfigError
from megabatch.plan.network import (
    Curve,
    Flows,
    Line,
    count_crossings,
    count_peer_flows,
    count_ring_flows,
    count_swap_flows,
    price_curve,
    price_swaps,
)
from tests.plan.laboratory import laboratory

SIZE = 51.12e6
STORED = Path(__file__).parents[2] / "benchmarks/simulators/simgrid.csv"
CELLS = list(csv.DictReader(STORED.read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell['algorithm']}-{cell['grid']}")
def test_equals_simgrid_to_half_a_per_cent(cell: dict[str, str]) -> None:
    network = laboratory().network
    if cell["algorithm"] == "nearest_first":
        ranks = int(cell["grid"])
        steps = Phase("all_reduce", "halving", -1, ranks).steps()
        # The same shares, nearest partner first: what is large stays near.
        swaps = [RoundGroup(1, step.share, distance=ranks // 2 // step.distance) for step in steps]
        seconds = price_swaps(network, ranks, swaps).seconds(SIZE)
    else:
        seconds = price_curve(network, cell["algorithm"], parse_grid(cell["grid"]), 4).at(SIZE).seconds
    assert 1e3 * seconds == pytest.approx(float(cell["milliseconds"]), rel=0.005)


def test_the_ring_by_hand() -> None:
    price = laboratory().all_reduce("ring", GridShape((64,)), SIZE)
    by_hand = 126 * (SIZE / 64 / 23e9 + 2 * 1e-6 + 2 * 1.5e-6)
    assert price.seconds == pytest.approx(by_hand)
    assert max(price.parts, key=lambda name: price.parts[name]) == "NIC"
    assert price.parts["latency"] == pytest.approx(126 * 5e-6)


def test_the_rack_uplink_binds_where_a_column_leaves_the_rack() -> None:
    column = phases("torus", GridShape((27, 128)))[1]
    assert column.operation == "all_reduce"
    parts = laboratory().all_reduce("torus", GridShape((27, 128)), SIZE).parts
    assert parts["rack uplink"] > 0
    assert laboratory().all_reduce("torus", GridShape((8, 8)), SIZE).parts["rack uplink"] == 0


def test_software_latency_counts_per_dependent_message() -> None:
    shape = GridShape((8, 8))
    with_software = laboratory(software="[software]\nlatency_microseconds = 20")
    difference = (
        with_software.all_reduce("torus", shape, SIZE).seconds - laboratory().all_reduce("torus", shape, SIZE).seconds
    )
    assert difference == pytest.approx(28 * 20e-6)


def test_channels_share_the_links() -> None:
    shape = GridShape((8, 8))
    two_way = laboratory().all_reduce("two_way_torus", shape, SIZE).seconds
    torus = laboratory().all_reduce("torus", shape, SIZE).seconds
    # Both halves cross the NIC: two channels cannot beat one by more than its idle time.
    assert torus / 2 < two_way
    assert Curve((Line(1.0, (0.0, 0.0, 0.0)), Line(0.0, (0.0, 1.0, 0.0)))).at(5.0).seconds == 5.0


def test_one_worker_pays_nothing() -> None:
    assert laboratory().all_reduce("ring", GridShape((1,)), SIZE).seconds == 0


def test_a_tree_is_only_for_clusters_that_say_so() -> None:
    tree = laboratory(software='[software]\ncollectives = "tree"\nlatency_microseconds = 0')
    shape = GridShape((1, 4096))
    assert tree.all_reduce("backend", shape, 1e6).seconds < 0.1 * laboratory().all_reduce("backend", shape, 1e6).seconds


def test_a_measured_grid_is_priced_by_its_axes() -> None:
    axes = (AxisCost(2e-3, 2.5e7, name="column", size=2), AxisCost(1e-4, 1e9, name="row", size=4))
    calibration = Calibration("2x4", 2, "gloo", axes, (MeasuredPoint("backend", 1_000_000, 0.25),))
    cluster = dataclasses.replace(laboratory(), calibration=calibration)
    shape = GridShape((2, 4))
    phase_list = calibration.phases("direct", shape, 1e6)
    wanted = all_reduce_seconds(phase_list, shape, calibration.links(shape), 1e6)
    assert cluster.all_reduce("direct", shape, 1e6).seconds == wanted
    assert cluster.all_reduce("backend", shape, 1e6).seconds == 0.25  # measured, not priced
    with pytest.raises(ConfigError, match="says nothing about grid 4x2"):
        cluster.all_reduce("torus", GridShape((4, 2)), 1e6)


@pytest.mark.parametrize("rate", [1.0, 23e9, 1e16])
@pytest.mark.parametrize("latency_seconds", [0.0, 1e-12, 3600.0])
def test_the_ring_by_hand_at_the_limits_of_what_is_accepted(rate: float, latency_seconds: float) -> None:
    network = dataclasses.replace(
        laboratory().network, worker_rate=rate, nic_rate=rate, worker_latency=0.0, nic_latency=latency_seconds
    )
    seconds = price_curve(network, "ring", GridShape((64,))).at(SIZE).seconds
    assert seconds == pytest.approx(126 * (SIZE / 64 / rate + 2 * latency_seconds), rel=1e-9)
    for algorithm in ALGORITHMS:
        shape = GridShape((8, 8))
        assert 0 <= price_curve(network, algorithm, shape).at(SIZE).seconds < 1e15


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
