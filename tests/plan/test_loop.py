"""Predicted beside measured, on a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from megabatch.plan.loop import compare_run, print_comparison
from megabatch.plan.planfile import plan_as_data
from megabatch.plan.planner import Goal, plan
from tests.plan.laboratory import laboratory, workload


def run_folder(folder: Path, factor: float, workers: int = 64, steps_factor: float = 1.0) -> Path:
    """A run whose compute took `factor` of what its plan said, after five slow steps."""
    load = workload()
    result = plan(laboratory(), load, [64], Goal())
    (folder / "plan.json").write_text(json.dumps(plan_as_data(result, "laboratory", load)), encoding="utf-8")
    parts = result.chosen.step_parts
    compute = factor * parts["compute"]
    other = parts["exposed communication"] + parts["stragglers"]
    row = {
        "global_batch_size": 32768,
        "compute_seconds": compute,
        "communication_seconds": other,
        "data_seconds": 1e-4 * compute,
        "step_seconds": compute + other,
        "images_per_second": 32768 / (compute + other),
    }
    rows = (
        [{**row, "step_seconds": 99.0, "compute_seconds": 99.0}] * 5
        + [row] * 7
        + [{**row, "global_batch_size": 64}] * 9
    )
    lines = [json.dumps({"step": index + 1, **one}) + "\n" for index, one in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    summary = {
        "status": "finished",
        "workers": workers,
        "steps": round(steps_factor * result.chosen.steps),
        "wall_seconds": factor * result.chosen.training.middle,
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def printed(folder: Path) -> str:
    out = Console(width=100, file=io.StringIO())
    print_comparison(compare_run(folder), out)
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_good_prediction_is_all_yes(tmp_path: Path) -> None:
    text = printed(run_folder(tmp_path, 1.0))
    assert "NO" not in text
    assert "differs" not in text
    assert text.count("yes") == 6
    assert "medians over steps of 32,768 images, the first 5 of the run left out" in text


def test_a_wrong_prediction_is_seen(tmp_path: Path) -> None:
    text = printed(run_folder(tmp_path, 4.0))
    assert "NO" in text
    assert "4.00" in text


def test_a_run_that_is_not_the_plans_is_told(tmp_path: Path) -> None:
    text = printed(run_folder(tmp_path, 1.0, workers=1, steps_factor=0.5))
    assert "the run differs from its plan: 1 worker instead of 64" in text
    assert "training is not compared" in text
