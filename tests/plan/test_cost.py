"""Closed-form prices against stored results of SimGrid 3.32, an independent simulator, and against formulas by
hand.

simgrid.csv: 51.12 MB on nodes of 4 workers (50 GB/s ports, 1 us), one 23 GB/s NIC each (1.5 us), racks of 34 nodes
with 283 GB/s uplinks (1 us), network model CM02 without cross-traffic, ranks in lock-step, no software latency. The
leader of the hierarchical runs pipelines four segments; halving-doubling there starts with its nearest partner.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint
from megabatch.comm.phases import ALGORITHMS, Phase, Step, phases
from megabatch.comm.price import all_reduce_seconds
from megabatch.comm.shape import GridShape, parse_grid
from megabatch.errors import ConfigError
from megabatch.plan.cost import Curve, Line, price_all_reduce, price_curve, price_swaps
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
        swaps = [Step(1, step.share, distance=ranks // 2 // step.distance) for step in steps]
        seconds = price_swaps(network, ranks, swaps).seconds(SIZE)
    else:
        seconds = price_curve(network, cell["algorithm"], parse_grid(cell["grid"]), 4).at(SIZE).seconds
    assert 1e3 * seconds == pytest.approx(float(cell["milliseconds"]), rel=0.005)


def test_the_ring_by_hand() -> None:
    price = price_all_reduce(laboratory(), "ring", GridShape((64,)), SIZE)
    by_hand = 126 * (SIZE / 64 / 23e9 + 2 * 1e-6 + 2 * 1.5e-6)
    assert price.seconds == pytest.approx(by_hand)
    assert price.binding == "NIC"
    assert price.parts["latency"] == pytest.approx(126 * 5e-6)


def test_the_rack_uplink_binds_where_a_column_leaves_the_rack() -> None:
    column = phases("torus", GridShape((27, 128)))[1]
    assert column.operation == "all_reduce"
    parts = price_all_reduce(laboratory(), "torus", GridShape((27, 128)), SIZE).parts
    assert parts["rack uplink"] > 0
    assert price_all_reduce(laboratory(), "torus", GridShape((8, 8)), SIZE).parts["rack uplink"] == 0


def test_software_latency_counts_per_dependent_message() -> None:
    shape = GridShape((8, 8))
    with_software = laboratory(software="[software]\nlatency_microseconds = 20")
    difference = (
        price_all_reduce(with_software, "torus", shape, SIZE).seconds
        - price_all_reduce(laboratory(), "torus", shape, SIZE).seconds
    )
    assert difference == pytest.approx(28 * 20e-6)


def test_lanes_share_the_links() -> None:
    shape = GridShape((8, 8))
    two_way = price_all_reduce(laboratory(), "two_way_torus", shape, SIZE).seconds
    torus = price_all_reduce(laboratory(), "torus", shape, SIZE).seconds
    # Both halves cross the NIC: two lanes cannot beat one by more than its idle time.
    assert torus / 2 < two_way
    assert Curve((Line(1.0, (0.0, 0.0, 0.0)), Line(0.0, (0.0, 1.0, 0.0)))).at(5.0).seconds == 5.0


def test_one_worker_pays_nothing() -> None:
    assert price_all_reduce(laboratory(), "ring", GridShape((1,)), SIZE).seconds == 0


def test_a_tree_is_only_for_clusters_that_say_so() -> None:
    tree = laboratory(software='[software]\ncollectives = "tree"\nlatency_microseconds = 0')
    shape = GridShape((1, 4096))
    assert (
        price_all_reduce(tree, "backend", shape, 1e6).seconds
        < 0.1 * price_all_reduce(laboratory(), "backend", shape, 1e6).seconds
    )


def test_a_measured_grid_is_priced_by_its_axes() -> None:
    axes = (AxisCost("column", 2, 2e-3, 2.5e7), AxisCost("row", 4, 1e-4, 1e9))
    calibration = Calibration("2x4", 2, "gloo", axes, (MeasuredPoint("backend", 1_000_000, 0.25),))
    cluster = dataclasses.replace(laboratory(), calibration=calibration)
    shape = GridShape((2, 4))
    phase_list = calibration.phases("direct", shape, 1e6)
    wanted = all_reduce_seconds(phase_list, shape, calibration.links(shape), 1e6)
    assert price_all_reduce(cluster, "direct", shape, 1e6).seconds == wanted
    assert price_all_reduce(cluster, "backend", shape, 1e6).seconds == 0.25  # measured, not priced
    with pytest.raises(ConfigError, match="says nothing about grid 4x2"):
        price_all_reduce(cluster, "torus", GridShape((4, 2)), 1e6)


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
