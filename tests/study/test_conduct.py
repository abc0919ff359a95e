"""A whole study: played by the stand-in trainer, and once with real, tiny training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.study.conduct import StudyRequest, conduct, plan_of


@pytest.mark.usefixtures("quick_trainer")
def test_files_and_what_is_said(study_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = StudyRequest(str(study_file), num_jobs=2, output=tmp_path / "out")
    assert conduct(request) == 0
    said = capsys.readouterr().out
    assert "tiny: 5 runs, 0 already finished, 2 at a time" in said
    assert "[5/5]" in said
    assert "| Small | 10 | 51.64 +- 1.00 (3) |" in said
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert names == {
        *("runs.csv", "arms.csv", "table.md", "study.json", "report.html"),
        *("arms.svg", "arms.png", "batch_sizes.svg", "batch_sizes.png"),
    }
    first = (tmp_path / "out" / "arms.csv").read_bytes()
    assert conduct(request) == 0  # nothing left to run: the same files again
    assert "5 already finished" in capsys.readouterr().out
    assert (tmp_path / "out" / "arms.csv").read_bytes() == first


@pytest.mark.usefixtures("quick_trainer")
def test_json_and_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = StudyRequest(
        "demo", ("train.label_smoothing=0.0,0.1",), seeds=2, num_jobs=2, output=tmp_path / "out", as_json=True
    )
    assert conduct(request) == 1
    heard = capsys.readouterr()
    whole = json.loads(heard.out)
    assert [(arm["arm"], arm["n"]) for arm in whole["arms"]] == [("train.label_smoothing=0.0", 2)]
    assert whole["runs_planned"] == 4
    assert heard.err.count("failed: train.label_smoothing=0.1") == 2
    assert "no luck" in heard.err


@pytest.mark.usefixtures("quick_trainer")
def test_collecting_runs_nothing(study_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conduct(StudyRequest(str(study_file), output=tmp_path / "out", collect_only=True)) == 0
    assert "no run has finished yet" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("quick_trainer")
def test_only_some_arms_are_run_and_all_are_shown(study_file: Path, tmp_path: Path) -> None:
    request = StudyRequest(str(study_file), num_jobs=2, output=tmp_path / "out", only="*2x")
    assert conduct(request) == 0
    assert {path.parent.name for path in (tmp_path / "out").glob("*/seed-0")} == {"large-2x"}
    assert conduct(replace(request, only="Sm*")) == 0
    rows = json.loads((tmp_path / "out" / "study.json").read_text())["arms"]
    assert [row["arm"] for row in rows] == ["Small", "large 2x", "large 2x, ensemble"]
    with pytest.raises(ConfigError, match="--only 'tiny' fits no arm; arms: Small, large 2x"):
        conduct(replace(request, only="tiny"))


def test_a_study_on_another_set(study_file: Path) -> None:
    arm = plan_of(StudyRequest(str(study_file), scale="cifar10")).arms[0]
    assert arm.scale == "cifar10"
    with pytest.raises(ConfigError, match="--scale of a study goes with a study file"):
        plan_of(StudyRequest("demo", scale="cifar10"))


def test_vary_does_not_go_with_a_study_file(study_file: Path) -> None:
    with pytest.raises(ConfigError, match="study file with its own arms"):
        plan_of(StudyRequest(str(study_file), vary=("train.epochs=1,2",)))


def test_real_training(tmp_path: Path) -> None:
    """Two tiny runs, one per size of batch, side by side; afterwards nothing is left to do."""
    changes = (
        *("data.source=generated", "data.generated.num_train=96", "data.generated.num_val=40", "data.image_size=8"),
        *("model.width=4", "train.epochs=1", "train.ghost_batch_size=16", "train.threads_per_worker=1"),
    )
    request = StudyRequest(
        "demo", ("train.global_batch_size=32,64",), changes, seeds=1, num_jobs=2, output=tmp_path, as_json=True
    )
    assert conduct(request) == 0
    rows = json.loads((tmp_path / "study.json").read_text())["arms"]
    assert [(row["steps"], row["n"]) for row in rows] == [(3, 1), (2, 1)]
    for row, folder in zip(rows, ("train.global_batch_size-32", "train.global_batch_size-64"), strict=True):
        summary = json.loads((tmp_path / folder / "seed-0" / "summary.json").read_text())
        assert row["mean_percent"] == pytest.approx(100 * summary["top1"])
        assert summary["val_images"] == 40
    assert conduct(request) == 0
