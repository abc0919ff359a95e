"""The calibration file: there and back, refused when wrong; and predictions whose winner is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megabatch.comm.calibration import (
    AxisCost,
    Calibration,
    MeasuredPoint,
    calibration_from_text,
    calibration_text,
    measured_seconds,
    predictions,
    read_calibration,
    write_calibration_file,
)
from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.price import LinkCost
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError

CALIBRATION = Calibration(
    grid="2x4",
    num_hosts=2,
    backend="gloo",
    axes=(AxisCost(2e-3, 25e6, 1e-5, 4.0, name="column", size=2), AxisCost(1e-4, 1e9, name="row", size=4)),
    points=(MeasuredPoint("torus", 1000, 0.25), MeasuredPoint("backend", 4000, 1 / 3)),
    versions={"torch": "2.13.0", "numpy": "2"},
)


def test_there_and_back_with_equal_bytes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "calibration.json"
    write_calibration_file(path, CALIBRATION)
    assert read_calibration(path) == CALIBRATION
    assert path.read_text(encoding="utf-8") == calibration_text(CALIBRATION)
    assert [file.name for file in path.parent.iterdir()] == ["calibration.json"]
    assert read_calibration(path).shape == GridShape((2, 4))
    assert json.loads(calibration_text(CALIBRATION))["axes"][0]["ranks_per_link"] == 4.0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"megabatch_calibration": 2}, "another format"),
        ({"axes": [{"name": "row"}]}, "is damaged"),
        (
            {"axes": [{"name": "row", "size": 8, "latency_seconds": -1, "bytes_per_second": 1}], "grid": "8"},
            "link cost",
        ),
        ({"axes": [{"name": "row", "size": 4, "latency_seconds": 1, "bytes_per_second": 1}], "grid": "8"}, "4"),
        ({"grid": "two"}, "not a shape"),
        ({"points": [{"algorithm": "tours", "message_bytes": 1, "seconds": 1}]}, "tours"),
        ({"points": [{"algorithm": "torus", "message_bytes": 1, "seconds": "1"}]}, "is damaged"),
        ({"points": 5}, "is damaged"),
        ({"grid": 5}, "is damaged"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_damaged_files_are_refused_in_one_line(change: dict[str, Any], told: str) -> None:
    content = json.loads(calibration_text(CALIBRATION)) | change
    with pytest.raises(ConfigError, match=told) as caught:
        calibration_from_text(json.dumps(content), "some.json")
    assert str(caught.value).startswith("some.json")
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for text, told in [("{", "not JSON"), ("[1]", "is no calibration"), ("{}", "is no calibration")]:
        with pytest.raises(ConfigError, match=told):
            calibration_from_text(text, "x")
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_calibration(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        read_calibration(tmp_path / "binary")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_calibration_file(tmp_path / "file" / "inside.json", CALIBRATION)


def test_links_are_those_of_the_measured_grid_only() -> None:
    shape = GridShape((2, 4))
    column = AxisCost(2e-3, 25e6, 1e-5, 4.0, name="column", size=2)
    assert CALIBRATION.links(shape) == (column, AxisCost(1e-4, 1e9, name="row", size=4))
    with pytest.raises(ConfigError, match="of grid 2x4 and says nothing about grid 4x2"):
        CALIBRATION.links(GridShape((4, 2)))
    # Links that are alike hold for every layout of the same ranks, with the worse of the two.
    alike = Calibration(
        "2x4", 8, "gloo", (AxisCost(2e-3, 25e6, name="a", size=2), AxisCost(3e-3, 40e6, name="b", size=4))
    )
    assert alike.links(GridShape((4, 2))) == (LinkCost(3e-3, 25e6),) * 2
    with pytest.raises(ConfigError, match="grid 4x4"):
        alike.links(GridShape((4, 4)))
    with pytest.raises(ConfigError, match="says nothing"):
        Calibration("2x4", 0, "nccl").links(shape)


def test_seconds_between_and_beyond_measured_points() -> None:
    points = [MeasuredPoint("torus", size, seconds) for size, seconds in ((1000, 1.0), (3000, 2.0), (4000, 4.0))]
    wanted = {0: 1.0, 1000: 1.0, 2000: 1.5, 3000: 2.0, 3500: 3.0, 4000: 4.0, 5000: 6.0}
    assert {size: measured_seconds(points, "torus", size) for size in wanted} == wanted
    assert measured_seconds(points, "ring", 1000) is None
    assert measured_seconds(points[:1], "torus", 5000) == 5.0
    falling = [MeasuredPoint("torus", 1000, 2.0), MeasuredPoint("torus", 2000, 1.0)]
    assert measured_seconds(falling, "torus", 9000) == 1.0


GRID = GridShape((4, 4))
KB, MB = 1000, 1_000_000


def _network(slow: AxisCost, fast: AxisCost, *backend: tuple[int, float], hosts: int = 4) -> Calibration:
    points = tuple(MeasuredPoint("backend", size, seconds) for size, seconds in backend)
    return Calibration("4x4", hosts, "gloo", (slow, fast), points)


LOOPBACK_ROW = AxisCost(5e-5, 1.5e9, 2e-5, name="row", size=4)
# Measured times of Gloo's own all-reduce on such networks, seconds: see the networks of the laboratory.
SHARED_NIC = _network(
    AxisCost(2.2e-3, 24e6, 3e-5, ranks_per_link=4.0, name="column", size=4),
    LOOPBACK_ROW,
    (100 * KB, 0.148),
    (10 * MB, 1.13),
)
NIC_PER_RANK = _network(
    AxisCost(2.2e-3, 12e6, 3e-5, name="column", size=4), LOOPBACK_ROW, (100 * KB, 0.145), (10 * MB, 1.53)
)
EQUAL_HOSTS = _network(
    AxisCost(5.2e-3, 12e6, 3e-5, name="column", size=4),
    AxisCost(5.2e-3, 12e6, 3e-5, name="row", size=4),
    *((10 * KB, 0.32), (100 * KB, 0.328), (1 * MB, 0.455), (10 * MB, 1.7)),
    hosts=16,
)
LOOPBACK = _network(
    AxisCost(6e-5, 0.4e9, 3e-5, name="column", size=4),
    AxisCost(6e-5, 0.4e9, 3e-5, name="row", size=4),
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
def test_the_known_winner_comes_first(calibration: Calibration, message_bytes: int, algorithms: set[str]) -> None:
    ranked = predictions(calibration, GRID, message_bytes)
    assert ranked[0].algorithm in algorithms
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    assert all(one.segment_bytes > 0 for one in ranked)


def test_with_a_shared_card_few_bytes_through_it_win() -> None:
    """Without latency the order follows bytes through the card alone: torus 1.5, leader and flat ring more."""
    card = AxisCost(0.0, 24e6, ranks_per_link=4.0, name="column", size=4)
    calibration = _network(card, AxisCost(0.0, 1e12, name="row", size=4), (MB, 1e3), (2 * MB, 2e3))
    ranked = [p.algorithm for p in predictions(calibration, GRID, 10 * MB)]
    assert set(ranked[:2]) <= {"torus", "direct", "hierarchical"}
    seconds = {p.algorithm: p.seconds for p in predictions(calibration, GRID, 10 * MB)}
    assert seconds["ring"] / seconds["torus"] == pytest.approx(1.25, rel=0.01)
    # Leaders alone cross too: 2 * 3/4 of the message. Two ways send half of it whole through the card.
    assert seconds["hierarchical"] / seconds["torus"] == pytest.approx(1.0, rel=0.01)
    assert seconds["two_way_torus"] > 2 * seconds["torus"]


def test_a_lone_point_is_continued_by_the_price() -> None:
    """A small message alone says nothing of bytes: 50 ms at 1 KB, and above it what a ring adds."""
    lone = replace(EQUAL_HOSTS, points=(MeasuredPoint("backend", 1 * KB, 0.05),))
    seconds = {size: {p.algorithm: p.seconds for p in predictions(lone, GRID, size)} for size in (500, 1 * KB, 10 * MB)}
    assert seconds[500]["backend"] == seconds[1 * KB]["backend"] == 0.05
    added = seconds[10 * MB]["ring"] - seconds[1 * KB]["ring"]
    assert seconds[10 * MB]["backend"] == pytest.approx(0.05 + added)


def test_a_backend_with_collectives_of_its_own_is_offered_what_differs() -> None:
    names = {p.algorithm for p in predictions(replace(NIC_PER_RANK, backend="nccl"), GRID, MB)}
    assert names == {"torus", "hierarchical", "backend"}
    assert {p.algorithm for p in predictions(NIC_PER_RANK, GRID, MB)} == set(ALGORITHMS)


def test_measured_times_count_more_than_prices() -> None:
    points = (*EQUAL_HOSTS.points, MeasuredPoint("ring", 100 * KB, 1e-3))
    best = predictions(replace(EQUAL_HOSTS, points=points), GRID, 100 * KB)[0]
    assert (best.algorithm, best.seconds, best.measured) == ("ring", 1e-3, True)
    # ... on the grid they were measured on.
    assert predictions(replace(EQUAL_HOSTS, points=points), GridShape((2, 8)), 100 * KB)[0].algorithm != "ring"


def test_points_alone_leave_only_the_backend() -> None:
    points = (MeasuredPoint("backend", MB, 1.0),)
    (only,) = predictions(Calibration("4x4", 0, "nccl", points=points), GRID, MB)
    assert (only.algorithm, only.seconds, only.measured) == ("backend", 1.0, True)
    with pytest.raises(ConfigError, match="no measurement at all"):
        predictions(Calibration("4x4", 0, "nccl"), GRID, MB)
