"""From words to an answer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.planfile import read_plan
from megabatch.plan.request import PlanRequest, answer, cluster_lines, parse_duration, run
from megabatch.plan.workload import workload_from_config
from megabatch.recipes import load_config

RESNET = ("model.name=resnet50", "data.image_size=224")


def test_json_and_a_file_that_train_can_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = PlanRequest("demo", "abci", "8", overrides=RESNET, as_json=True, output=tmp_path / "plan.json")
    answer(request)
    data = json.loads(capsys.readouterr().out)
    assert data["workers"] == 8
    assert data["settings"]["train.global_batch_size"] == 512
    assert data["prediction"]["step_seconds"]["low"] < data["prediction"]["step_seconds"]["high"]
    assert read_plan(tmp_path / "plan.json").grid == data["grid"]
    assert data["calibration"] == {"sources": [], "fit": None}
    assert data["would_help"][0]["gain"] > 0


def test_words_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    answer(PlanRequest("goyal2017", "abci", "8,16", target=75.9, batches=("8192", "0:4096 2:8192")))
    assert "Choice" in capsys.readouterr().out


def test_clusters_are_listed() -> None:
    assert any(line.startswith("abci") for line in cluster_lines())


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90", "90s", "10 min", "2h", "1.5d")] == [90, 90, 600, 7200, 129_600]
    for text in ("soon", "5 years", "0s", "1.2.3s"):
        with pytest.raises(ConfigError, match="10min"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"recipe": ""}, "no recipe given"),
        ({"cluster": ""}, "no cluster given"),
        ({"cluster": "abcd"}, "did you mean"),
        ({"recipe": "nobody"}, "unknown recipe"),
        ({"target": 80.0}, "say nothing about it"),
        ({"target": 0.0}, "is no accuracy"),
        ({"target": 75.9}, "are of resnet50 on ImageNet"),
        ({"recipe": "goyal2017", "overrides": ("model.name=resnet101",), "target": 75.9}, "trains resnet101"),
        ({"target": 75.9, "epochs": 10.0}, "leave one of them out"),
        (
            {"recipe": "goyal2017", "overrides": ("train.epochs=30",), "target": 75.9},
            "train.epochs=30 was given",
        ),
        ({"family": "nvidia:dgx1"}, "no table was given"),
        ({"epochs": 1e-9}, "trains nothing"),
        ({"objective": "fun"}, "choose time or cost"),
        ({"budget": -1.0}, "buys nothing"),
        ({"budget": float("nan")}, "buys nothing"),
        ({"batches": ("34817",)}, "is not a multiple of train.ghost_batch_size"),
        ({"batches": ("40000000000",)}, "trains nothing"),
        ({"workers": "x"}, "cannot be read"),
        ({"workers": "5000"}, "holds 4,352"),
        ({"algorithms": ("torsu",)}, "did you mean 'torus'"),
        ({"batches": ("-5",)}, "positive"),
        ({"grid": "3x3"}, "needs 9 workers"),
    ],
)
def test_mistakes_are_one_clear_line(changed: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"recipe": "demo", "cluster": "abci", "workers": "8", "overrides": RESNET}
    with pytest.raises(Exception, match=words) as caught:
        run(PlanRequest(**(given | changed)))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_stages_are_stretched_to_the_target_as_schedules_are(tmp_path: Path) -> None:
    """What is written is what `megabatch train` makes of it: the same stages, at the same parts of the way."""
    asked = PlanRequest("adabatch2017", "dgx-a100", "64", target=75.9, output=tmp_path / "plan.json", as_json=True)
    result = run(asked).result
    own = [one for one in result.candidates if one.batch.count(",") > 3]
    assert own
    answer(dataclasses.replace(asked, batches=(), algorithms=("backend",)))
    planned = read_plan(tmp_path / "plan.json")
    config = load_config("adabatch2017", list(planned.overrides), epochs=planned.epochs)
    made = workload_from_config(config, "adabatch2017")
    steps = sum(number for _, number in made.steps_by_stage(made.epochs))
    assert steps == pytest.approx(planned.prediction["steps"], rel=0.02)


def test_a_plan_that_could_not_be_followed_is_not_written(tmp_path: Path) -> None:
    asked = PlanRequest(
        "codreanu2017",
        "abci",
        "896",
        target=75.9,
        overrides=("collapse.at_epochs=[60.0]",),
        output=tmp_path / "plan.json",
    )
    with pytest.raises(ConfigError, match=r"could not be followed: .*trunk ends"):
        answer(asked)
    assert not (tmp_path / "plan.json").exists()
