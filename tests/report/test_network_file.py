"""Files of `bench allreduce`, of both kinds, and anything else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint, write_calibration_file
from megabatch.comm.phases import phases
from megabatch.comm.price import all_reduce_seconds
from megabatch.errors import DataError
from megabatch.report.network_file import read_network, times_of_run
from megabatch.report.run import read_run
from tests.report.folders import make_run

CALIBRATION = Calibration(
    "2x2",
    2,
    "gloo",
    (AxisCost("column", 2, 1e-3, 1e7), AxisCost("row", 2, 1e-4, 1e9)),
    tuple(MeasuredPoint(name, size, 0.01) for name in ("torus", "backend") for size in (1024, 2**20)),
)


def test_a_calibration_gives_points_lines_and_times_of_phases(tmp_path: Path) -> None:
    write_calibration_file(tmp_path / "c.json", CALIBRATION)
    times = read_network(tmp_path / "c.json", message_bytes=2**20)
    assert len(times.measured) == 4
    lines = [row for row in times.modelled if row["algorithm"] == "torus"]
    assert {row["algorithm"] for row in times.modelled} == {"torus"}  # the backend's own is not modelled
    assert (lines[0]["message_bytes"], lines[-1]["message_bytes"]) == (1024, 2**20)
    shape, links = CALIBRATION.shape, CALIBRATION.links(CALIBRATION.shape)
    assert lines[-1]["seconds"] == all_reduce_seconds(phases("torus", shape), shape, links, 2**20)
    assert sum(times.phase_seconds["torus"]) == pytest.approx(lines[-1]["seconds"])
    assert read_network(tmp_path / "c.json").phase_seconds == {}


def test_without_measured_axes_nothing_is_modelled(tmp_path: Path) -> None:
    write_calibration_file(tmp_path / "c.json", dataclasses.replace(CALIBRATION, axes=()))
    times = read_network(tmp_path / "c.json", message_bytes=2**20)
    assert len(times.measured) == 4
    assert times.modelled == ()
    assert times.phase_seconds == {}


def test_what_the_bench_printed(tmp_path: Path) -> None:
    rows = [{"algorithm": "ring", "message_bytes": 8, "p50_seconds": 1.0}, 3]
    for content in (rows, {"grid": "2x2", "rows": rows}):
        (tmp_path / "b.json").write_text(json.dumps(content))
        assert read_network(tmp_path / "b.json").measured == (rows[0],)


@pytest.mark.parametrize("content", [None, "{", "[]", "3", '{"rows": 5}', '{"megabatch_calibration": 99}'])
def test_anything_else_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError) as caught:
        read_network(tmp_path / "x.json")
    assert "\n" not in str(caught.value)
    assert "x.json" in str(caught.value)


def test_a_run_folder_may_hold_its_own(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert times_of_run(read_run(folder)).measured == ()
    write_calibration_file(folder / "calibration.json", CALIBRATION)
    times = times_of_run(read_run(folder))
    assert len(times.measured) == 4
    assert times.message_bytes == 4 * 2**20
    (folder / "calibration.json").write_text("{")
    assert times_of_run(read_run(folder)).measured == ()
