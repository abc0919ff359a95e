"""Predicted beside measured, from a run folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megabatch.errors import DataError
from megabatch.plan.loop import compare_run, print_comparison
from megabatch.plan.planfile import plan_as_data
from megabatch.plan.planner import Goal, plan
from tests.plan.laboratory import laboratory, workload


def run_folder(folder: Path, factor: float) -> Path:
    """A run whose compute took `factor` of what its plan said, after three slow updates."""
    load = workload()
    result = plan(laboratory(), load, [64], Goal())
    (folder / "plan.json").write_text(json.dumps(plan_as_data(result, "laboratory", load, "32768")), encoding="utf-8")
    parts = result.chosen.step_parts
    compute = factor * parts["compute"]
    other = parts["exposed communication"] + parts["stragglers"]
    row = {
        "batch_total": 32768,
        "compute_seconds": compute,
        "communication_seconds": other,
        "data_seconds": 0.0,
        "update_seconds": compute + other,
        "images_per_second": 32768 / (compute + other),
    }
    rows = [{**row, "update_seconds": 99.0, "compute_seconds": 99.0}] * 3 + [row] * 7 + [{**row, "batch_total": 64}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    summary = {
        "status": "finished",
        "updates": result.chosen.updates,
        "wall_seconds": factor * result.chosen.training.middle,
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def test_parts_are_compared_without_the_first_updates(tmp_path: Path) -> None:
    parts = {one.part: one for one in compare_run(run_folder(tmp_path, 1.1))}
    assert set(parts) == {"update", "compute", "communication and waiting", "waiting for data", "images/s", "training"}
    assert parts["compute"].ratio == pytest.approx(1.1)
    assert parts["communication and waiting"].ratio == pytest.approx(1.0)
    assert parts["compute"].num_measured == 7
    assert parts["update"].inside
    assert parts["training"].ratio == pytest.approx(1.1)


def test_a_wrong_prediction_is_seen(tmp_path: Path) -> None:
    parts = {one.part: one for one in compare_run(run_folder(tmp_path, 4.0))}
    assert not parts["update"].inside
    out = Console(width=100, file=io.StringIO())
    print_comparison(list(parts.values()), out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "NO" in text
    assert "4.00" in text


def test_runs_without_a_plan_or_updates(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="followed no plan"):
        compare_run(tmp_path)
    folder = run_folder(tmp_path, 1.0)
    (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="at least 4 are needed"):
        compare_run(folder)
