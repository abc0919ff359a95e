"""The calibration file: there and back, refused when wrong, and nccl-tests' own file as a source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.comm.calibration import (
    AxisCost,
    Calibration,
    MeasuredPoint,
    bus_factor,
    calibration_from_text,
    calibration_text,
    measured_seconds,
    read_calibration,
    read_nccl_tests,
    write_calibration_file,
)
from megabatch.comm.price import LinkCost
from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError

CALIBRATION = Calibration(
    grid="2x4",
    num_hosts=2,
    backend="gloo",
    axes=(AxisCost("column", 2, 2e-3, 25e6, 1e-5, 4.0), AxisCost("row", 4, 1e-4, 1e9)),
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
    assert CALIBRATION.links(shape) == (LinkCost(2e-3, 25e6, 1e-5, 4.0), LinkCost(1e-4, 1e9))
    with pytest.raises(ConfigError, match="of grid 2x4 and says nothing about grid 4x2"):
        CALIBRATION.links(GridShape((4, 2)))
    # Links that are alike hold for every layout of the same ranks, with the worse of the two.
    alike = Calibration("2x4", 8, "gloo", (AxisCost("a", 2, 2e-3, 25e6), AxisCost("b", 4, 3e-3, 40e6)))
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


def _nccl_row(size: int, **changes: Any) -> dict[str, Any]:
    body = {"time": 33.5, "alg_bw": 0.25, "bus_bw": 0.4375, "nwrong": 0.0}
    row = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1", "out_of_place": body}
    return row | {"in_place": body | {"time": 30.0}, "actual_iterations": 20, "experiment_name": ""} | changes


def _nccl_file(folder: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "version": 3,
        "start_time": "2026-07-09 16:03:21",
        "args": ["./build/all_reduce_perf", "-J", "out.json"],
        "env": ["HOME=/root"],
        "nccl_version": 22900,
        "config": {"nthreads": 1, "ngpus": 8, "devices": []},
        "results": [_nccl_row(0), _nccl_row(2**20), _nccl_row(8192)],
        "out_of_bounds": {"count": 0, "okay": True},
        "average_bus_bandwidth": {"bandwidth": 0.4, "okay": "unchecked"},
    }
    path = folder / "nccl.json"
    path.write_text(json.dumps(content | changes))
    return path


def test_nccl_tests_rows_become_points(tmp_path: Path) -> None:
    wanted = (MeasuredPoint("backend", 8192, 3e-5), MeasuredPoint("backend", 2**20, 3e-5))
    assert read_nccl_tests(_nccl_file(tmp_path)) == wanted
    # Only out of place, by processor time, and cut off in the last row.
    rows = [_nccl_row(4096, in_place=None, out_of_place={"cpu_time": 12.0, "nwrong": None}), {"size": 8192}]
    (point,) = read_nccl_tests(_nccl_file(tmp_path, version=1, results=rows))
    assert point == MeasuredPoint("backend", 4096, 1.2e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 4}, "format 4"),
        ({"version": None}, "format None"),
        ({"args": ["/opt/all_gather_perf"]}, "is of all_gather_perf"),
        ({"results": None}, "is not from nccl-tests"),
        ({"results": []}, "no finished row"),
        ({"results": ["row"]}, "a row without size or time"),
        ({"results": [_nccl_row(8, in_place={"alg_bw": 1.0})]}, "a row without size or time"),
        ({"results": [_nccl_row(8, in_place={"time": "nan"})]}, "time nan"),
        ({"results": [_nccl_row(8, in_place={"time": 1.0, "nwrong": 3.0})]}, "8 bytes has wrong results"),
    ],
)
def test_other_nccl_files_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        read_nccl_tests(_nccl_file(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_what_is_no_nccl_file_at_all(tmp_path: Path) -> None:
    for text, told in [
        ("# nccl-tests", "is not JSON"),
        ("[]", "is not from nccl-tests"),
        ("{}", "not from nccl-tests"),
    ]:
        (tmp_path / "x").write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_nccl_tests(tmp_path / "x")


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [bus_factor(n) for n in (1, 2, 4, 8)] == [0, 1, 1.5, 1.75]
