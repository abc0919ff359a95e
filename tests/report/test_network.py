"""All-reduce by size: points measured, lines modelled, one colour per algorithm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint, write_calibration_file
from megabatch.comm.phases import ALGORITHMS, Phase, phases
from megabatch.comm.price import all_reduce_seconds
from megabatch.comm.shape import parse_grid
from megabatch.errors import DataError
from megabatch.report.figure import Figure, Missing
from megabatch.report.network import (
    MAX_SIDE,
    NetworkTimes,
    all_reduce,
    moves,
    network_times,
    read_network,
    torus_as_data,
)
from megabatch.report.page import all_figures
from megabatch.report.run import Run, read_run, read_runs
from tests.report.folders import make_hostile_run, make_run


def cell(algorithm: str, size: int, seconds: float, **extra: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "message_bytes": size, "seconds": seconds} | extra


def test_points_and_lines_of_an_algorithm_share_a_colour_and_differ_in_tag() -> None:
    measured = (cell("torus", 2048, 2.0), cell("torus", 1024, 1.0), cell("backend", 2048, 3.0))
    figure = all_reduce(NetworkTimes(measured, {"torus": [(1024, 1.1), (2048, 1.9)]}, source="x.json"))
    assert isinstance(figure, Figure)
    torus, backend, line = figure.series
    assert (torus.x, torus.y, torus.mark, torus.tag) == ((1024.0, 2048.0), (1.0, 2.0), "points", "measured")
    assert (line.y, line.mark, line.tag, line.color) == ((1.1, 1.9), "line", "simulated", torus.color)
    assert backend.color != torus.color
    assert figure.title == "At 2 KiB torus is fastest, 1.50 times the backend's own"
    assert "x.json" in figure.caption


def test_rows_of_the_bench_bring_p95_and_n() -> None:
    rows = tuple(
        {"algorithm": "ring", "message_bytes": size, "p50_seconds": 1.0, "p95_seconds": 1.5, "iterations": 20}
        for size in (1024, 4096)
    )
    figure = all_reduce(NetworkTimes(rows))
    assert isinstance(figure, Figure)
    assert (figure.series[0].low, figure.series[0].high, figure.series[0].n) == ((1.0, 1.0), (1.5, 1.5), (20, 20))


def test_unusable_rows_are_left_out_and_nothing_usable_is_a_reason() -> None:
    bad: tuple[Any, ...] = (3, {"algorithm": "torus"}, cell("torus", -1, 1.0), cell("torus", 8, 0.0), cell("", 8, 1.0))
    missing = all_reduce(NetworkTimes(bad))
    assert isinstance(missing, Missing)
    assert "megabatch bench allreduce" in missing.why
    figure = all_reduce(NetworkTimes((*bad, cell("<b>new</b>", 8, 1.0))))
    assert isinstance(figure, Figure)
    assert [(one.name, one.color) for one in figure.series] == [("<b>new</b>", "other")]


CALIBRATION = Calibration(
    "2x2",
    2,
    "gloo",
    (AxisCost(1e-3, 1e7, name="column", size=2), AxisCost(1e-4, 1e9, name="row", size=2)),
    tuple(MeasuredPoint(name, size, 0.01) for name in ("torus", "backend") for size in (1024, 2**20)),
)


def test_a_calibration_gives_points_lines_and_times_of_phases(tmp_path: Path) -> None:
    write_calibration_file(tmp_path / "c.json", CALIBRATION)
    times = read_network(tmp_path / "c.json", message_bytes=2**20)
    assert len(times.measured) == 4
    assert list(times.modelled) == ["torus"]  # the backend's own is not modelled
    (first, _), *_, (last, seconds) = times.modelled["torus"]
    assert (first, last) == (1024, 2**20)
    shape, links = CALIBRATION.shape, CALIBRATION.links(CALIBRATION.shape)
    assert seconds == all_reduce_seconds(phases("torus", shape), shape, links, 2**20)
    assert sum(times.phase_seconds["torus"]) == pytest.approx(seconds)
    assert read_network(tmp_path / "c.json").phase_seconds == {}


def test_without_measured_axes_nothing_is_modelled(tmp_path: Path) -> None:
    write_calibration_file(tmp_path / "c.json", dataclasses.replace(CALIBRATION, axes=()))
    times = read_network(tmp_path / "c.json", message_bytes=2**20)
    assert len(times.measured) == 4
    assert times.modelled == {}
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
    assert network_times([read_run(folder)]).measured == ()
    write_calibration_file(folder / "calibration.json", CALIBRATION)
    times = network_times([read_run(folder)])
    assert len(times.measured) == 4
    assert times.message_bytes == 4 * 2**20
    (folder / "calibration.json").write_text("{")
    assert network_times([read_run(folder)]).measured == ()


def test_what_is_given_wins_over_what_the_folders_hold_and_the_first_folder_that_holds_one_is_taken(
    tmp_path: Path,
) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")])
    write_calibration_file(tmp_path / "b" / "calibration.json", CALIBRATION)
    assert network_times(runs).source == "calibration.json"
    given = {"algorithm": "ring", "message_bytes": 8, "seconds": 1.0}
    (tmp_path / "given.json").write_text(json.dumps([given]))
    times = network_times(runs, tmp_path / "given.json")
    assert (times.measured, times.source) == ((given,), "given.json")
    assert any(isinstance(one, Figure) and one.key == "all_reduce" for one in all_figures(runs, times))


def drawn(algorithm: str, grid: str) -> list[tuple[Phase, list[tuple[tuple[int, int], ...]]]]:
    shape = parse_grid(grid)
    return [(phase, moves(phase, shape, shape.sizes)) for phase in phases(algorithm, shape)]


def test_the_worked_example() -> None:
    (row_rs, first), (column, second), (row_ag, third) = drawn("torus", "2x2")
    names = [phase.name(("column", "row")) for phase in (row_rs, column, row_ag)]
    assert names == ["row reduce-scatter", "column all-reduce", "row all-gather"]
    assert [sorted(step) for step in first] == [[(0, 1), (1, 0), (2, 3), (3, 2)]]
    assert [sorted(step) for step in second] == [[(0, 2), (1, 3), (2, 0), (3, 1)]] * 2
    assert third == first


@pytest.mark.parametrize("grid", ["2x2", "2x3", "3x4", "1x5", "4x4"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_as_many_steps_are_drawn_as_the_phase_list_counts(algorithm: str, grid: str) -> None:
    for phase, steps in drawn(algorithm, grid):
        assert len(steps) == phase.num_steps
        assert all(step for step in steps)
        assert all(a != b for step in steps for a, b in step)


def reach(algorithm: str, grid: str) -> list[set[int]]:
    """Whose contribution could have arrived where, if every message carried all that its sender has."""
    shape = parse_grid(grid)
    held = [{rank} for rank in range(shape.world_size)]
    for _, steps in drawn(algorithm, grid):
        for step in steps:
            before = [set(one) for one in held]
            for a, b in step:
                held[b] |= before[a]
    return held


@pytest.mark.parametrize("grid", ["2x2", "2x3", "3x4", "1x5"])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "two_way_torus"])
def test_every_contribution_can_reach_every_worker(algorithm: str, grid: str) -> None:
    everyone = set(range(parse_grid(grid).world_size))
    assert reach(algorithm, grid) == [everyone] * len(everyone)


def test_a_large_grid_is_drawn_in_part_with_its_real_numbers(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", workers=3456, grid="48x72"))
    torus = torus_as_data(run, NetworkTimes())
    assert torus is not None
    assert (torus["rows"], torus["columns"], torus["real_grid"], torus["is_part"]) == (
        MAX_SIDE,
        MAX_SIDE,
        "48x72",
        True,
    )
    ours = next(one for one in torus["algorithms"] if one["name"] == "torus")
    assert [phase["num_steps"] for phase in ours["phases"]] == [71, 94, 71]
    assert [len(phase["steps"]) for phase in ours["phases"]] == [5, 10, 5]
    assert ours["phases"][0]["sent_share"] == pytest.approx(71 / 72)
    assert len(json.dumps(torus)) < 300_000


def test_times_of_phases_are_shown_when_the_network_was_measured(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    torus = torus_as_data(run, NetworkTimes(phase_seconds={"torus": [0.1, 0.2, 0.1], "ring": [1.0, 2.0]}))
    assert torus is not None
    by_name = {one["name"]: [phase["seconds"] for phase in one["phases"]] for one in torus["algorithms"]}
    assert by_name["torus"] == [0.1, 0.2, 0.1]
    assert by_name["ring"] == [None]  # of another grid: not these phases
    assert torus["message_bytes"] == 4 * 2**20


def test_three_axes_are_folded_into_rows(tmp_path: Path) -> None:
    torus = torus_as_data(read_run(make_run(tmp_path / "a", workers=8, grid="2x2x2")), NetworkTimes())
    assert torus is not None
    assert (torus["rows"], torus["columns"]) == (4, 2)
    ours = next(one for one in torus["algorithms"] if one["name"] == "torus")
    assert [phase["axis"] for phase in ours["phases"]] == [1, 0, 0, 0, 1]


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert torus_as_data(Run("a", tmp_path), NetworkTimes()) is None
    assert torus_as_data(read_run(make_run(tmp_path / "one", workers=1, grid="1x1")), NetworkTimes()) is None
    hostile = torus_as_data(read_run(make_hostile_run(tmp_path / "bad")), NetworkTimes())
    assert hostile is not None
    assert [one["name"] for one in hostile["algorithms"]] == list(ALGORITHMS)
    huge = torus_as_data(Run("a", tmp_path, environment={"grid": [10**6] * 6}), NetworkTimes())
    assert huge is not None
    for sizes in ([2, "x"], [0, 4], "2x2", [10**7, 2], {"a": 1}):
        assert torus_as_data(Run("a", tmp_path, environment={"grid": sizes}), NetworkTimes()) is None
