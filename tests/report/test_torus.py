"""The animation's moves are the messages the phase list speaks of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.comm.phases import ALGORITHMS, Phase, phases
from megabatch.comm.shape import parse_grid
from megabatch.report.network import NetworkTimes
from megabatch.report.run import Run, read_run
from megabatch.report.torus import MAX_SIDE, moves, torus_as_data
from tests.report.folders import make_hostile_run, make_run


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
