"""`megabatch plan`: what it prints, and the files it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabatch.cli import app
from megabatch.errors import ConfigError
from megabatch.plan.plan_file import read_plan
from megabatch.plan.workload import workload_from_config
from megabatch.recipes import load_config

RESNET = ("--set", "model.name=resnet50", "--set", "data.image_size=224")


def typed(*words: object) -> str:
    """What is printed after `megabatch plan`; an error is raised."""
    return CliRunner().invoke(app, ["plan", *map(str, words)], catch_exceptions=False).stdout


def test_json_and_a_file_that_train_can_follow(tmp_path: Path) -> None:
    said = typed("demo", "--cluster", "abci", "--workers", 8, *RESNET, "--json", "--output", tmp_path / "plan.json")
    data = json.loads(said)
    assert data["workers"] == 8
    assert data["settings"]["train.global_batch_size"] == 512
    assert data["prediction"]["step_seconds"]["low"] < data["prediction"]["step_seconds"]["high"]
    assert read_plan(tmp_path / "plan.json").grid == data["grid"]
    assert data["calibration"] == {"sources": [], "fit": None}
    assert data["sensitivity"][0]["gain"] > 0
    assert data["epochs_from"] == "the recipe's own 8"


def test_words_for_people() -> None:
    words = ("--workers", "8,16", "--target", 75.9, "--batch", 8192, "--batch", "0:4096 2:8192")
    said = " ".join(typed("goyal2017", "--cluster", "abci", *words).split())
    assert "Choice" in said
    assert "reference convergence points at global batches of 1,632 to 67,840, not the recipe's own 90" in said


def test_clusters_are_listed_and_shown() -> None:
    assert any(line.startswith("abci ") for line in typed("--cluster", "list").splitlines())
    assert "link.nic.gigabits_per_second" in typed("--cluster", "dgx-a100")
    shown = json.loads(typed("--cluster", "dgx-a100", "--json"))
    assert shown["unknown"] == ["loader rate"]


def test_stages_are_stretched_to_the_target_as_schedules_are(tmp_path: Path) -> None:
    """What is written is what `megabatch train` makes of it: the same stages, at the same parts of the way."""
    words = ("adabatch2017", "--cluster", "dgx-a100", "--workers", 64, "--target", 75.9, "--json")
    data = json.loads(typed(*words))
    assert [one for one in data["candidates"] if one["batch"].count(",") > 3]
    typed(*words, "--algorithm", "backend", "--output", tmp_path / "plan.json")
    planned = read_plan(tmp_path / "plan.json")
    config = load_config("adabatch2017", list(planned.overrides), epochs=planned.epochs)
    made = workload_from_config(config, "adabatch2017")
    steps = sum(number for _, number in made.steps_by_stage(made.epochs))
    assert steps == pytest.approx(planned.prediction["steps"], rel=0.02)


def test_a_plan_that_could_not_be_followed_is_not_written(tmp_path: Path) -> None:
    words = ("codreanu2017", "--cluster", "abci", "--workers", 896, "--target", 75.9)
    with pytest.raises(ConfigError, match=r"could not be followed: .*trunk ends"):
        typed(*words, "--set", "collapse.at_epochs=[60.0]", "--output", tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_a_figure_is_three_files_and_its_parts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the figure is an extra")
    typed("goyal2017", "--cluster", "abci", "--workers", "8,16", "--figure", tmp_path / "front.png")
    names = {f"{stem}.{suffix}" for stem in ("front", "front_parts") for suffix in ("svg", "png", "csv")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_words_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--validate looks at a file alone, but --target was given too"):
        typed("--validate", tmp_path / "rows.csv", "--target", 75.9)
