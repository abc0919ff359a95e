"""Predictions of plan.json beside the run's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.report.figure import Figure, Missing
from megabatch.report.figures.plan import predicted
from megabatch.report.plan_compare import compare_run
from megabatch.report.run import Run, read_run, read_runs
from tests.report.folders import make_run


def run_with_plan(folder: Path, prediction: object, **plan: object) -> Run:
    make_run(folder)
    (folder / "plan.json").write_text(json.dumps({"megabatch_plan": 1, "prediction": prediction, **plan}))
    return read_run(folder)


PREDICTION = {
    "step_seconds": {"low": 0.06, "middle": 0.08, "high": 0.12},
    "data_seconds": {"low": 0, "middle": 0, "high": 0},
    "images_per_second": {"low": 5600, "middle": 6400, "high": 8000},
    "training_seconds": {"low": 100, "middle": 150, "high": 200},
    "steps": 100,
}


def test_measured_over_predicted_with_the_interval(tmp_path: Path) -> None:
    figure = predicted([run_with_plan(tmp_path / "a", PREDICTION)])
    assert isinstance(figure, Figure)
    before, after = figure.series
    assert (before.tag, after.tag) == ("simulated", "measured")
    assert before.x == ("time per step", "images per second", "training time")
    assert before.low == pytest.approx((0.75, 0.875, 2 / 3))
    assert before.high == pytest.approx((1.5, 1.25, 4 / 3))
    assert after.y == pytest.approx((1.25, 3030 / 6400, 1.0))
    assert after.n == (51, 51, 1)
    assert figure.title == "Time per step was 125.00 % of the prediction"
    assert "2 of 4 lie in their interval" in figure.caption  # what was predicted as 0 counts, and cannot be drawn
    assert "waiting for data: none (at most 1.6 ms) predicted, 5 ms measured" in figure.caption
    assert "Medians over steps of 512 images, the first 5 of the run left out." in figure.caption
    assert "differs" not in figure.caption


def test_the_terminal_and_the_page_say_the_same(tmp_path: Path) -> None:
    run = run_with_plan(tmp_path / "a", PREDICTION, workers=8)
    found, figure = compare_run(tmp_path / "a"), predicted([run])
    assert isinstance(figure, Figure)
    drawn = [one for one in found.parts if one.predicted]
    assert figure.series[1].y == tuple(one.ratio for one in drawn)
    assert figure.series[1].n == tuple(one.num_measured for one in drawn)
    assert figure.caption.startswith("The run differs from its plan: 4 workers instead of 8.")
    assert figure.title.endswith("of the prediction, which was for another run")


def test_a_damaged_plan_is_a_reason(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    (tmp_path / "a" / "plan.json").write_text("{")
    made = predicted([read_run(tmp_path / "a")])
    assert isinstance(made, Missing)
    assert "not whole JSON" in made.why


@pytest.mark.parametrize("prediction", [None, [], {"step_seconds": {"middle": 0}}, {"step_seconds": {"middle": "x"}}])
def test_a_plan_without_numbers_is_a_reason(tmp_path: Path, prediction: object) -> None:
    made = predicted([run_with_plan(tmp_path / "a", prediction)])
    assert isinstance(made, Missing)


def test_no_plan_and_several_runs(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")])
    assert "no plan" in getattr(predicted(runs[:1]), "why", "")
    assert isinstance(predicted(runs), Missing)
