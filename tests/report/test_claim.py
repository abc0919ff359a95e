"""The claim, its conditions, and how to repeat it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.report.claim import (
    MAX_SETTINGS,
    conditions,
    differing_settings,
    headline,
    is_in_time,
    is_reached,
    repeat_commands,
    result_rows,
    settings_of,
    status,
    tiles,
)
from megabatch.report.run import Run, read_run, read_runs
from tests.report.folders import make_hostile_run, make_run


def test_a_finished_run_against_its_reference(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    assert headline([run]) == "resnet8 reached 91.17 % top-1 in 2.42 min on 4 workers"
    accuracy, time, speed = tiles(run)
    assert (accuracy.value, accuracy.reference, accuracy.is_reached) == ("91.17 %", "at least 90 % top-1", True)
    assert "all 10,000 validation images" in accuracy.detail
    assert (time.value, time.reference, time.is_reached) == ("2.42 min", "under 5 minutes on 2 CPU cores", True)
    assert "n" not in speed.value or "images/s" in speed.value
    assert "median of 95 steps" in speed.detail
    assert status(run) == ("finished", "good")


@pytest.mark.parametrize(
    ("top1", "reference", "wanted"),
    [
        (0.9, "at least 90 % top-1", True),
        (0.8999, "90%", False),
        (0.5, "no number", None),
        (0.76, "75.9 % (paper)", True),
    ],
)
def test_a_reference_is_reached_or_not_or_names_no_number(top1: float, reference: str, wanted: bool | None) -> None:
    assert is_reached(top1, reference) is wanted


@pytest.mark.parametrize(
    ("seconds", "reference", "wanted"),
    [
        (299.0, "under 5 minutes of training", True),
        (301.0, "under 5 minutes of training", False),
        (224.0, "224 s", True),
        (74.8, "74.7 s", False),
        (3599.0, "1 hour", True),
        (14400.0, "240 minutes with one member", True),
        (1.0, "2,512 steps", None),
        (1.0, "not given", None),
    ],
)
def test_a_time_is_in_time_or_not_or_names_none(seconds: float, reference: str, wanted: bool | None) -> None:
    assert is_in_time(seconds, reference) is wanted


def test_a_time_on_other_workers_than_the_reference_has_no_verdict(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    config = (folder / "config.toml").read_text().replace('time = "', 'workers = 1024\ntime = "')
    (folder / "config.toml").write_text(config)
    assert [tile.is_reached for tile in tiles(read_run(folder))] == [True, None, None]


def test_conditions_name_the_recipe_and_the_images(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo-20260101-120000")
    config = (folder / "config.toml").read_text().replace("[model]", 'path = "photos"\nimage_size = 28\n[model]')
    (folder / "config.toml").write_text(config)
    environment = json.loads((folder / "environment.json").read_text())
    environment["data"] = {"train_images": 60000, "val_images": 10000, "classes": 10, "channels": 1}
    (folder / "environment.json").write_text(json.dumps(environment))
    found = dict(conditions(read_run(folder)))
    assert found["recipe"] == "demo: none"
    assert found["images"] == ("fashion-mnist, photos, 60,000 to train, 10,000 to validate, 10 classes, 28 x 28 pixels")


def test_a_run_that_goes_on_claims_nothing_yet(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", finished=False))
    assert headline([run]) == "resnet8 after 4.00 epochs"
    assert status(run) == ("no result yet", "")
    assert [(tile.label, tile.is_reached) for tile in tiles(run)] == [("Top-1 accuracy", None), ("Throughput", None)]


def test_a_stopped_run_says_by_what(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", finished=False)
    (folder / "summary.json").write_text(json.dumps({"status": "stopped", "stopped_by": "SIGTERM", "top1": None}))
    assert status(read_run(folder)) == ("stopped by SIGTERM", "bad")


def test_conditions_name_machines_versions_grid_and_batch_stages(tmp_path: Path) -> None:
    found = dict(conditions(read_run(make_run(tmp_path / "a"))))
    assert found["workers"] == "4 in a grid of 2x2"
    assert found["hosts (workers)"] == "node0 (4)"
    assert found["batch stages"] == "0:256 2:512"
    assert "torch 2.13.0" in found["versions"]
    assert found["all-reduce"] == "torus, gradients in fp32"


def test_commands_repeat_the_run_and_quote_its_name(tmp_path: Path) -> None:
    lines = repeat_commands(read_run(make_run(tmp_path / "a; rm -rf x")))
    assert lines[0] == f"git checkout {'a' * 40}"
    assert lines[1].startswith("megabatch train 'a; rm -rf x'/config.toml --workers 4 --grid 2x2")
    assert len(lines) == 3


def test_a_comparison_names_the_best_and_lists_all(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", workers=2, grid="1x2", finished=False)])
    assert headline(runs) == "2 runs compared: a reached the most, 91.17 % top-1"
    head, rows = result_rows(runs)
    assert all(len(row) == len(head) for row in rows)
    assert rows[1][:3] == ["b", "no result yet", "-"]
    assert headline(runs[1:] * 2) == "2 runs compared"


def test_hostile_values_do_not_raise(tmp_path: Path) -> None:
    run = read_run(make_hostile_run(tmp_path / "a"))
    assert tiles(run)
    assert conditions(run)
    assert repeat_commands(run)
    assert headline([run])


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
    shown = "[until_epoch=4.0, start=0.1; until_epoch=8.0, start=0.2]"
    assert settings_of(Run("a", Path(), config={"lr": pieces})) == {"lr": shown}


def test_deep_and_endless_settings_are_cut() -> None:
    deep: dict[str, Any] = {"leaf": 1}
    for _ in range(500):
        deep = {"a": deep}
    assert len(settings_of(Run("a", Path(), config=deep))) == 1
    endless = {f"k{n}": n for n in range(10 * MAX_SETTINGS)}
    assert len(settings_of(Run("a", Path(), config=endless))) <= MAX_SETTINGS
    long = settings_of(Run("a", Path(), config={"x" * 1000: {"z": ["y" * 1000] * 1000}}))
    assert all(len(name) <= 70 and len(value) <= 300 for name, value in long.items())
