"""Files of `megabatch bench step`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megabatch.errors import ConfigError
from megabatch.plan.step_times import StepRow, StepTimes, read_step_times, step_times_from_data, step_times_text
from tests.plan.laboratory import two_layers

TIMES = StepTimes(
    "resnet8",
    "cpu",
    1,
    0.6,
    two_layers(),
    (StepRow(32, 0.05, 0.02, 9), StepRow(64, 0.09, 0.03, 9)),
    {"torch": "2.13.0"},
)


def test_goes_out_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(step_times_text(TIMES), encoding="utf-8")
    back = read_step_times(tmp_path / "step.json")
    assert back == TIMES
    assert back.table.seconds(48) == pytest.approx(0.07)
    assert back.table.relative_deviation == pytest.approx(math.hypot(0.03, 1.25 * 0.03 / 3))
    assert back.deviation == 0.03


ROW = {"local_batch": 64, "seconds": 0.09, "deviation": 0.03, "iterations": 9}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", []),
        ("rows", [5]),
        ("rows", [ROW | {"iterations": 0}]),
        ("rows", [ROW | {"seconds": 1e300}]),
        ("rows", [ROW | {"seconds": math.inf}]),
        ("rows", [ROW | {"deviation": math.nan}]),
        ("rows", [ROW | {"local_batch": 64.5}]),
        ("rows", [ROW | {"local_batch": "64"}]),
        ("backward_share", 1.5),
        ("backward_share", "0.6"),
        ("threads", math.inf),
        ("layers", [{}]),
        ("layers", []),
        ("layers", [{"name": "x", "parameters": -5, "work": 1.0}]),
        ("layers", [{"name": "x", "parameters": 5, "work": 0.5}]),
        ("megabatch_step_times", 7),
        ("model", None),
        ("device", "c\npu"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, key: str, value: object) -> None:
    content = json.loads(step_times_text(TIMES))
    content[key] = value
    if value is None:
        del content[key]
    (tmp_path / "step.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match="measure again") as caught:
        read_step_times(tmp_path / "step.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ROW | {"seconds": 0.03}, "contradict each other: 64 images in 30 ms, but 32 in 50 ms; measure again"),
        (ROW | {"local_batch": 32}, "hold local batch 32 twice"),
    ],
)
def test_times_that_contradict_each_other_are_refused(row: dict[str, float], words: str) -> None:
    content = json.loads(step_times_text(TIMES))
    content["rows"][1] = row
    with pytest.raises(ConfigError, match=words):
        step_times_from_data(content, "'step.json'")


def test_a_fall_within_the_scatter_of_the_steps_is_chance() -> None:
    content = json.loads(step_times_text(TIMES))
    content["rows"][1]["seconds"] = 0.048  # 4 % less; two deviations of the medians are 6.5 %
    assert step_times_from_data(content, "'step.json'").table.seconds(64) == pytest.approx(0.048)
    content["rows"][1]["seconds"] = 0.046
    with pytest.raises(ConfigError, match="contradict each other"):
        step_times_from_data(content, "'step.json'")
