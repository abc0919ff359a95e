"""Choices from made-up calibrations whose winner is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint
from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.select import (
    SIZE_CLASSES_BYTES,
    choose,
    exposed_seconds,
    predictions,
    size_class,
    size_text,
    suggest_bucket_mb,
    suggest_grid,
)
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError

GRID = GridShape((4, 4))
KB, MB = 1000, 1_000_000


def _network(slow: AxisCost, fast: AxisCost, *backend: tuple[int, float], hosts: int = 4) -> Calibration:
    points = tuple(MeasuredPoint("backend", size, seconds) for size, seconds in backend)
    return Calibration("4x4", hosts, "gloo", (slow, fast), points)


LOOPBACK_ROW = AxisCost("row", 4, 5e-5, 1.5e9, 2e-5)
# Measured times of Gloo's own all-reduce on such networks, seconds: see the networks of the laboratory.
SHARED_NIC = _network(
    AxisCost("column", 4, 2.2e-3, 24e6, 3e-5, ranks_per_link=4.0), LOOPBACK_ROW, (100 * KB, 0.148), (10 * MB, 1.13)
)
NIC_PER_RANK = _network(AxisCost("column", 4, 2.2e-3, 12e6, 3e-5), LOOPBACK_ROW, (100 * KB, 0.145), (10 * MB, 1.53))
EQUAL_HOSTS = _network(
    AxisCost("column", 4, 5.2e-3, 12e6, 3e-5),
    AxisCost("row", 4, 5.2e-3, 12e6, 3e-5),
    *((10 * KB, 0.32), (100 * KB, 0.328), (1 * MB, 0.455), (10 * MB, 1.7)),
    hosts=16,
)
LOOPBACK = _network(
    AxisCost("column", 4, 6e-5, 0.4e9, 3e-5),
    AxisCost("row", 4, 6e-5, 0.4e9, 3e-5),
    *((10 * KB, 2e-4), (1 * MB, 1e-3), (100 * MB, 0.1)),
    hosts=1,
)


@pytest.mark.parametrize(
    ("calibration", "message_bytes", "algorithms"),
    [
        (EQUAL_HOSTS, 1 * KB, {"exchange"}),  # two hops, bytes do not matter
        (EQUAL_HOSTS, 100 * KB, {"torus", "direct"}),  # four hops, and every byte sent once
        (SHARED_NIC, 10 * MB, {"torus", "two_way_torus", "direct"}),  # 1.5 of the message through the card, not 1.875
        (NIC_PER_RANK, 10 * MB, {"torus", "two_way_torus", "direct"}),
        (LOOPBACK, 10 * KB, {"backend"}),
        (LOOPBACK, 1 * MB, {"backend"}),
        (LOOPBACK, 100 * MB, {"backend"}),
    ],
)
def test_the_known_winner_is_chosen(calibration: Calibration, message_bytes: int, algorithms: set[str]) -> None:
    choice = choose(calibration, GRID, message_bytes)
    assert choice.algorithm in algorithms
    assert choice.message_bytes == message_bytes
    assert choice.predicted_seconds == pytest.approx(
        min(p.seconds for p in predictions(calibration, GRID, message_bytes) if p.algorithm == choice.algorithm)
    )
    assert choice.reason.startswith(f"{size_text(message_bytes)}: {choice.algorithm}, ")
    assert "\n" not in choice.reason
    assert choice.segment_bytes > 0
    assert 1 <= choice.bucket_mb <= 200


def test_with_a_shared_card_few_bytes_through_it_win() -> None:
    """Without latency the order follows bytes through the card alone: torus 1.5, leader and flat ring more."""
    card = AxisCost("column", 4, 0.0, 24e6, ranks_per_link=4.0)
    calibration = _network(card, AxisCost("row", 4, 0.0, 1e12), (MB, 1e3), (2 * MB, 2e3))
    ranked = [p.algorithm for p in predictions(calibration, GRID, 10 * MB)]
    assert set(ranked[:2]) <= {"torus", "direct", "hierarchical"}
    seconds = {p.algorithm: p.seconds for p in predictions(calibration, GRID, 10 * MB)}
    assert seconds["ring"] / seconds["torus"] == pytest.approx(1.25, rel=0.01)
    # Leaders alone cross too: 2 * 3/4 of the message. Two ways send half of it whole through the card.
    assert seconds["hierarchical"] / seconds["torus"] == pytest.approx(1.0, rel=0.01)
    assert seconds["two_way_torus"] > 2 * seconds["torus"]


def test_the_backend_stays_unless_it_is_clearly_beaten() -> None:
    torus = min(p.seconds for p in predictions(NIC_PER_RANK, GRID, 10 * MB))
    for factor, wanted in ((1.04, True), (1.07, False)):
        points = (MeasuredPoint("backend", 10 * MB, factor * torus),)
        choice = choose(replace(NIC_PER_RANK, points=points), GRID, 10 * MB)
        assert (choice.algorithm == "backend") is wanted
        assert ("best other is" in choice.reason) is wanted


def test_measured_times_count_more_than_prices() -> None:
    points = (*EQUAL_HOSTS.points, MeasuredPoint("ring", 100 * KB, 1e-3))
    choice = choose(replace(EQUAL_HOSTS, points=points), GRID, 100 * KB)
    assert choice.algorithm == "ring"
    assert "1 ms measured against the backend's 328 ms measured" in choice.reason
    # ... on the grid they were measured on.
    assert choose(replace(EQUAL_HOSTS, points=points), GridShape((2, 8)), 100 * KB).algorithm != "ring"


def test_a_lone_point_is_continued_by_the_price() -> None:
    """A small message alone says nothing of bytes: 50 ms at 1 KB, and above it what a ring adds."""
    lone = replace(EQUAL_HOSTS, points=(MeasuredPoint("backend", 1 * KB, 0.05),))
    seconds = {size: {p.algorithm: p.seconds for p in predictions(lone, GRID, size)} for size in (500, 1 * KB, 10 * MB)}
    assert seconds[500]["backend"] == seconds[1 * KB]["backend"] == 0.05
    added = seconds[10 * MB]["ring"] - seconds[1 * KB]["ring"]
    assert seconds[10 * MB]["backend"] == pytest.approx(0.05 + added)


def test_reasons_name_latency_or_bytes() -> None:
    assert choose(EQUAL_HOSTS, GRID, 100 * KB).reason.endswith("4 dependent messages, a flat ring has 30")
    exchange = choose(EQUAL_HOSTS, GRID, 25 * KB)
    assert exchange.algorithm == "exchange"  # sends more bytes, so those cannot be the reason
    assert exchange.reason.endswith("2 dependent messages, a flat ring has 30")
    assert "of the message along the column, 1.88 in a flat ring" in choose(NIC_PER_RANK, GRID, 100 * MB).reason


def test_a_backend_with_collectives_of_its_own_is_offered_what_differs() -> None:
    names = {p.algorithm for p in predictions(replace(NIC_PER_RANK, backend="nccl"), GRID, MB)}
    assert names == {"torus", "hierarchical", "backend"}
    assert {p.algorithm for p in predictions(NIC_PER_RANK, GRID, MB)} == set(ALGORITHMS)


def test_points_alone_leave_only_the_backend() -> None:
    points = (MeasuredPoint("backend", MB, 1.0),)
    choice = choose(Calibration("4x4", 0, "nccl", points=points), GRID, MB)
    assert (choice.algorithm, choice.predicted_seconds) == ("backend", 1.0)
    assert choice.reason.endswith("nothing else is known")
    with pytest.raises(ConfigError, match="no measurement at all"):
        choose(Calibration("4x4", 0, "nccl"), GRID, MB)


def test_size_classes() -> None:
    assert [size_class(size) for size in (0, 1, 50_000, 100_000, 10**6, 10**7, 25 * 2**20, 10**9)] == [
        *(SIZE_CLASSES_BYTES[0], SIZE_CLASSES_BYTES[0], SIZE_CLASSES_BYTES[1], SIZE_CLASSES_BYTES[1]),
        *(SIZE_CLASSES_BYTES[2], SIZE_CLASSES_BYTES[3], SIZE_CLASSES_BYTES[4], SIZE_CLASSES_BYTES[4]),
    ]
    assert [size_text(size) for size in (7, 2048, 1536 * 1024)] == ["7 bytes", "2 KiB", "1.5 MiB"]


def test_bucket_size_follows_latency_and_overlap() -> None:
    gradients = 100 * MB
    # Nothing but bytes, as fast as gradients come: the smallest bucket leaves the least at the end.
    bytes_only = _network(AxisCost("column", 4, 0.0, 1e9), AxisCost("row", 4, 0.0, 1e9), (MB, 1e-3), (100 * MB, 0.1))
    assert suggest_bucket_mb(bytes_only, GRID, gradients, 0.1) <= 2
    # Nothing but latency, and no time to hide it in: one bucket.
    latency_only = _network(AxisCost("column", 4, 0.1, 1e15), AxisCost("row", 4, 0.1, 1e15), (MB, 10.0), (2 * MB, 10.0))
    assert suggest_bucket_mb(latency_only, GRID, gradients, 0.0) == 200
    # Worked by hand: 200 ms per all-reduce whatever its size (two hops), gradients ready evenly over 1 s. Four buckets
    # of 25 MB leave the last one open; thirteen of 8 MB queue up from the moment the first is ready.
    assert exposed_seconds(latency_only, GRID, 100 * 2**20, 1.0, 25) == pytest.approx(0.2)
    assert exposed_seconds(latency_only, GRID, 100 * 2**20, 1.0, 8) == pytest.approx(0.08 + 13 * 0.2 - 1.0)
    with pytest.raises(ConfigError, match="0 bytes of gradients"):
        suggest_bucket_mb(bytes_only, GRID, 0, 1.0)


def test_grid_follows_the_links() -> None:
    assert suggest_grid(NIC_PER_RANK, 10 * MB) == GRID  # its rows are hosts
    flat = replace(EQUAL_HOSTS, grid="1x16", axes=(AxisCost("column", 1, 0, 1e12), AxisCost("row", 16, 5e-3, 12e6)))
    assert suggest_grid(flat, 1 * MB) in (GridShape((4, 4)), GridShape((2, 8)), GridShape((8, 2)))
