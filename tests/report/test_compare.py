"""What differs in the settings of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megabatch.report.compare import MAX_SETTINGS, differing_settings, flatten
from megabatch.report.run import Run, read_runs
from tests.report.folders import make_run


def test_only_what_differs_is_listed(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=7, algorithm="ring")])
    assert differing_settings(runs) == [("comm.algorithm", ["torus", "ring"]), ("train.seed", ["0", "7"])]
    assert differing_settings(runs[:1] * 2) == []


def test_a_setting_only_one_run_has_and_the_reference_which_is_no_setting(tmp_path: Path) -> None:
    one = Run("a", tmp_path, config={"train": {"x": 1}, "reference": {"time": "a"}})
    other = Run("b", tmp_path, config={"train": {}, "reference": {"time": "b"}})
    assert differing_settings([one, other]) == [("train.x", ["1", "-"])]


def test_schedules_are_shown_in_a_line() -> None:
    pieces = [{"until_epoch": 4.0, "start": 0.1}, {"until_epoch": 8.0, "start": 0.2}]
    assert flatten({"lr": pieces}) == {"lr": "[until_epoch=4.0, start=0.1; until_epoch=8.0, start=0.2]"}


def test_deep_and_endless_settings_are_cut() -> None:
    deep: dict[str, Any] = {"leaf": 1}
    for _ in range(500):
        deep = {"a": deep}
    assert len(flatten(deep)) == 1
    assert len(flatten({f"k{n}": n for n in range(10 * MAX_SETTINGS)})) <= MAX_SETTINGS + 1
    assert all(len(value) <= 300 for value in flatten({"x": ["y" * 1000] * 1000}).values())
