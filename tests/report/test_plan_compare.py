"""A plan beside the run that followed it: parts, what the run did otherwise, and folders that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megabatch.errors import DataError
from megabatch.report.figure import Figure, Missing
from megabatch.report.plan_compare import PartComparison, compare, predicted
from megabatch.report.run import Run, read_run, read_runs
from tests.report.folders import make_run, row


def about(middle: float) -> dict[str, float]:
    return {"low": 0.8 * middle, "middle": middle, "high": 1.25 * middle}


PREDICTION: dict[str, Any] = {
    "step_seconds": about(0.1),
    "compute_seconds": about(0.085),
    "communication_and_waiting_seconds": about(0.01),
    "data_seconds": about(0.0),
    "images_per_second": about(5120.0),  # of 512 images a step
    "training_seconds": about(145.0),
    "steps": 100,
}
PLAN: dict[str, Any] = {
    "megabatch_plan": 1,
    "workers": 4,
    "grid": "2x2",
    "overrides": ["comm.grad_dtype=fp32", "train.global_batch_size=512", "optimizer.lr.0.end=0.0", "data.path=/there"],
    "settings": {"comm.algorithm": "torus", "train.global_batch_size": "0:256 2:512", "train.ghost_batch_size": 64},
    "prediction": PREDICTION,
}


def planned_run(folder: Path, plan: object = PLAN, **how: Any) -> Path:
    make_run(folder, **how)
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def parts_of(folder: Path) -> dict[str, PartComparison]:
    return {one.part: one for one in compare(read_run(folder)).parts}


def test_steps_of_the_priced_batch_are_compared_without_the_first(tmp_path: Path) -> None:
    found = compare(read_run(planned_run(tmp_path / "a")))
    parts = {one.part: one for one in found.parts}
    names = ["step", "compute", "communication and waiting", "waiting for data", "images/s", "training"]
    assert list(parts) == names
    assert (found.differences, found.difference_line, found.remark) == ((), "", "")
    assert parts["step"].num_measured == 51  # those of 512 images
    assert parts["compute"].measured == 0.08
    assert parts["training"].measured == 150.0  # the wall clock: the plan counts evaluations
    assert not parts["communication and waiting"].inside
    data = found.as_data()
    assert [one["part"] for one in data["parts"]] == names
    assert data["parts"][0]["inside"] is True
    small = {**PREDICTION, "images_per_second": about(2560.0)}
    parts = parts_of(planned_run(tmp_path / "b", {**PLAN, "prediction": small}))
    assert parts["step"].num_measured == 44  # those of 256 images, first five left out


def test_a_part_predicted_as_nothing_may_take_a_little(tmp_path: Path) -> None:
    # 5 ms of a step of 100 ms is more than 2 %; 1.9 ms is not.
    assert not parts_of(planned_run(tmp_path / "a"))["waiting for data"].inside
    part = parts_of(planned_run(tmp_path / "b", data_seconds=0.0019))["waiting for data"]
    assert part.inside
    assert (part.low, part.ratio) == (0.0, float("inf"))
    assert part.high == pytest.approx(0.002)


def test_a_run_that_is_not_the_plans_is_told(tmp_path: Path) -> None:
    plan = {**PLAN, "workers": 2, "overrides": ["comm.grad_dtype=fp16"], "settings": {"train.global_batch_size": 2048}}
    found = compare(read_run(planned_run(tmp_path / "a", plan, workers=1, grid="1x1")))
    assert found.difference_line == (
        "the run differs from its plan: 1 worker instead of 2, comm.grad_dtype fp32 instead of fp16, "
        "train.global_batch_size 0:256 2:512 instead of 2048"
    )
    found = compare(read_run(planned_run(tmp_path / "b", {**PLAN, "grid": "4x1"})))
    assert found.differences == ("grid 2x2 instead of 4x1",)
    # Settings that agree, and steps that do not: the run was stopped before its larger batch, or chose its own.
    huge = {**PREDICTION, "images_per_second": about(10240.0)}
    found = compare(read_run(planned_run(tmp_path / "c", {**PLAN, "prediction": huge})))
    assert found.differences == ("steps of 512 images instead of 1,024",)


def test_another_training_is_not_timed_as_a_whole(tmp_path: Path) -> None:
    found = compare(read_run(planned_run(tmp_path / "a", {**PLAN, "prediction": {**PREDICTION, "steps": 200}})))
    assert "training" not in {one.part for one in found.parts}
    assert "the run made 100 steps, the plan counted 200" in found.remark
    found = compare(read_run(planned_run(tmp_path / "b", finished=False)))
    assert "not finished" in found.remark
    assert "training" in parts_of(planned_run(tmp_path / "c", {**PLAN, "prediction": {**PREDICTION, "steps": 99}}))


def test_folders_that_cannot_be_compared_are_one_line(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(DataError) as caught:
            compare(read_run(folder))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "followed no plan" in refused(make_run(tmp_path / "no plan"))
    assert "is not a folder" in refused(tmp_path / "none")
    (tmp_path / "docs").mkdir()
    assert "holds no run" in refused(tmp_path / "docs")
    (planned_run(tmp_path / "cut") / "plan.json").write_text('{"megabatch_plan": 1, "predi')
    assert "plan.json is not whole JSON" in refused(tmp_path / "cut")
    assert "holds no prediction" in refused(planned_run(tmp_path / "empty", {"prediction": {"step_seconds": {}}}))
    assert "holds no prediction" in refused(planned_run(tmp_path / "list", {"prediction": [1]}))
    (planned_run(tmp_path / "no metrics") / "metrics.jsonl").unlink()
    assert "0 steps (metrics.jsonl is not there); at least 6" in refused(tmp_path / "no metrics")
    assert "5 steps; at least 6" in refused(planned_run(tmp_path / "short", num_steps=5))


def test_hostile_values_are_passed_over(tmp_path: Path) -> None:
    bad = {**PREDICTION, "compute_seconds": {"middle": "x"}, "data_seconds": [], "training_seconds": {"middle": -1.0}}
    plan = {
        **PLAN,
        "workers": "two",
        "grid": {},
        "overrides": [1, None, "x", "a.b=[["],
        "settings": 7,
        "prediction": bad,
    }
    folder = planned_run(tmp_path / "a", plan)
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('nonsense\n[1]\n{"step": 7, "step_seconds": "x"}\n' + json.dumps(row(7)))
    found = compare(read_run(folder))
    assert [one.part for one in found.parts] == ["step", "communication and waiting", "images/s"]
    assert found.differences == ()


def run_with_plan(folder: Path, prediction: object, **plan: object) -> Run:
    make_run(folder)
    (folder / "plan.json").write_text(json.dumps({"megabatch_plan": 1, "prediction": prediction, **plan}))
    return read_run(folder)


FEW_PARTS = {
    "step_seconds": {"low": 0.06, "middle": 0.08, "high": 0.12},
    "data_seconds": {"low": 0, "middle": 0, "high": 0},
    "images_per_second": {"low": 5600, "middle": 6400, "high": 8000},
    "training_seconds": {"low": 100, "middle": 150, "high": 200},
    "steps": 100,
}


def test_measured_over_predicted_with_the_interval(tmp_path: Path) -> None:
    figure = predicted([run_with_plan(tmp_path / "a", FEW_PARTS)])
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
    run = run_with_plan(tmp_path / "a", FEW_PARTS, workers=8)
    found, figure = compare(run), predicted([run])
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
