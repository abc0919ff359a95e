"""Predictions of plan.json beside the run's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabatch.report.figure import Figure, Missing
from megabatch.report.figures.plan import predicted
from megabatch.report.run import Run, read_run, read_runs
from tests.report.folders import make_run


def run_with_plan(folder: Path, prediction: object) -> Run:
    make_run(folder)
    (folder / "plan.json").write_text(json.dumps({"megabatch_plan": 1, "prediction": prediction}))
    return read_run(folder)


def test_measured_over_predicted_with_the_interval(tmp_path: Path) -> None:
    prediction = {
        "step_seconds": {"low": 0.06, "middle": 0.08, "high": 0.12},
        "images_per_second": {"low": 3500, "middle": 4000, "high": 5000},
        "training_seconds": {"low": 100, "middle": 145, "high": 200},
    }
    figure = predicted([run_with_plan(tmp_path / "a", prediction)])
    assert isinstance(figure, Figure)
    before, after = figure.series
    assert (before.tag, after.tag) == ("simulated", "measured")
    assert before.low == pytest.approx((0.75, 0.875, 100 / 145))
    assert before.high == pytest.approx((1.5, 1.25, 200 / 145))
    assert after.y == pytest.approx((1.25, 3030 / 4000, 1.0))
    assert after.n == (95, 95, 1)
    assert figure.title == "Time per update was 125.00 % of the prediction"
    assert "2 of 3 lie in their interval" in figure.caption


@pytest.mark.parametrize("prediction", [None, [], {"step_seconds": {"middle": 0}}, {"step_seconds": {"middle": "x"}}])
def test_a_plan_without_numbers_is_a_reason(tmp_path: Path, prediction: object) -> None:
    made = predicted([run_with_plan(tmp_path / "a", prediction)])
    assert isinstance(made, Missing)


def test_no_plan_and_several_runs(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")])
    assert "no plan" in getattr(predicted(runs[:1]), "why", "")
    assert isinstance(predicted(runs), Missing)
