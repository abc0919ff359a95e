"""Step times between and beyond the measured batches."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megabatch.errors import ConfigError, DataError
from megabatch.plan.compute import (
    ComputeTable,
    StepRow,
    StepTimes,
    check_points,
    empirical_maximum,
    expected_maximum,
    step_times_from_data,
    step_times_text,
)
from tests.plan.laboratory import two_layers

TABLE = ComputeTable("resnet50", ((16.0, 0.026), (32.0, 0.050), (64.0, 0.098)))


def test_lines_between_the_points() -> None:
    assert TABLE.seconds(32) == pytest.approx(0.050)
    assert TABLE.seconds(24) == pytest.approx(0.038)
    assert TABLE.deviation(24) == 0
    assert TABLE.warnings(24) == []


def test_beyond_the_table_the_line_goes_on_and_a_warning_says_so() -> None:
    assert TABLE.seconds(128) == pytest.approx(0.194)
    assert TABLE.seconds(8) == pytest.approx(0.014)
    assert TABLE.deviation(8) == pytest.approx(0.04)
    assert TABLE.deviation(256) == pytest.approx(0.08)
    assert "outside the measured table (16 to 64)" in TABLE.warnings(8)[0]


def test_a_image_never_becomes_faster_than_the_best_measured() -> None:
    steep = ComputeTable("resnet50", ((32.0, 0.020), (64.0, 0.100)))
    assert steep.seconds(8) >= 0.98 * 8 * 0.020 / 32


def test_a_lone_point_has_a_fixed_part() -> None:
    lone = ComputeTable("resnet50", ((100.0, 1.0),))
    assert lone.seconds(100) == pytest.approx(1.0)
    assert lone.seconds(50) == pytest.approx(0.02 + 0.49)
    assert lone.times(2).seconds(50) == pytest.approx(1.02)


def test_a_fall_within_the_tolerance_is_chance() -> None:
    points = [(64.0, 0.097), (32.0, 0.100)]
    check_points(points, "x", tolerance=0.04)
    with pytest.raises(ConfigError, match="64 images in 97 ms, but 32 in 100 ms; measure again"):
        check_points(points, "x", tolerance=0.02)


TIMES = StepTimes(
    "resnet8",
    "cpu",
    1,
    0.6,
    two_layers(),
    (StepRow(32, 0.05, 0.02, 9), StepRow(64, 0.09, 0.03, 9)),
    {"torch": "2.13.0"},
)


def test_goes_out_and_comes_back() -> None:
    back = step_times_from_data(json.loads(step_times_text(TIMES)), "x")
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
def test_damaged_files_are_refused(key: str, value: object) -> None:
    content = json.loads(step_times_text(TIMES))
    content[key] = value
    if value is None:
        del content[key]
    with pytest.raises(ConfigError, match="measure again") as caught:
        step_times_from_data(content, "'step.json'")
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


@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_worlds_are_exact(count: int) -> None:
    known = {1: 0.0, 2: 1 / math.sqrt(math.pi), 3: 1.5 / math.sqrt(math.pi)}
    assert expected_maximum(count) == pytest.approx(known[count], abs=1e-6)


@pytest.mark.parametrize("count", [8, 64, 1024, 6000])
def test_equals_the_mean_of_many_draws(count: int) -> None:
    draws = np.random.default_rng(5).standard_normal((600, count)).max(axis=1)
    error = draws.std() / math.sqrt(len(draws))
    assert expected_maximum(count) == pytest.approx(draws.mean(), abs=4 * error + 0.005)
    assert math.sqrt(2 * math.log(count)) > 1.1 * draws.mean()


def test_rises_with_the_world_and_joins_at_the_switch() -> None:
    values = [expected_maximum(count) for count in (1, 2, 8, 63, 64, 65, 512, 4095, 4096, 4097, 1_000_000)]
    assert values == sorted(values)
    assert expected_maximum(4097) - expected_maximum(4096) < 0.03


def test_measured_times_replace_the_law() -> None:
    times = np.random.default_rng(7).standard_t(3, size=5000) * 0.01 + 1
    draws = np.random.default_rng(8).choice(times, size=(20_000, 32)).max(axis=1)
    assert empirical_maximum(times.tolist(), 32) == pytest.approx(draws.mean(), rel=3e-3)
    assert empirical_maximum([1.0, 2.0, 3.0], 1) == pytest.approx(2.0)
    assert empirical_maximum([1.0, 2.0], 2) == pytest.approx(1.75)


def test_nonsense_is_refused() -> None:
    with pytest.raises(DataError, match="at least 1"):
        expected_maximum(0)
    with pytest.raises(DataError, match="at least 2"):
        empirical_maximum([1.0], 4)
    with pytest.raises(DataError, match="finite"):
        empirical_maximum([1.0, math.nan], 4)
