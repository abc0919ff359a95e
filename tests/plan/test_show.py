"""What a person sees."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megabatch.plan.calibrate import Evidence
from megabatch.plan.cluster_file import cluster_as_data, cluster_names, cluster_text, load_cluster, read_cluster
from megabatch.plan.estimate import Estimator
from megabatch.plan.fit import fit_steps
from megabatch.plan.plan_file import plan_as_data
from megabatch.plan.search import Goal, plan
from megabatch.plan.show import (
    draw_plan,
    print_cluster,
    print_comparison,
    print_plan,
    print_validation,
)
from megabatch.plan.validate import validate_rows
from megabatch.report.plan_compare import compare
from megabatch.report.run import read_run
from tests.plan.laboratory import laboratory, workload
from tests.plan.test_fit import row
from tests.plan.test_validate import written


def test_a_plan_fits_the_terminal_and_says_everything() -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    cluster, load = load_cluster("dgx-a100"), workload(65536, 16)
    print_plan(plan(Estimator(cluster, load), [512, 1024, 4096, 40960], Goal()), Evidence(cluster), load, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("Choice (least time", "training", "80", "Bound by", "would save", "wider interval", "USD", "*"):
        assert words in text
    assert "left out: 40,960 workers: " in text
    table = text.split("> chosen")[0].splitlines()
    assert max(len(line) for line in table) <= 80
    assert "\u2026" not in text


def test_a_fit_is_shown_with_its_uncertainty() -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    cluster, load = load_cluster("dgx-a100"), workload(65536, 16)
    evidence = Evidence(cluster, fit=fit_steps([row(8, 408.0), row(64, 51.0)]))
    print_plan(plan(Estimator(cluster, load, fit=evidence.fit), [512], Goal()), evidence, load, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("per_image", "us an image", "+-", "scatter", "not determined by the rows"):
        assert words in text
    assert "evaluation  " not in text.split("Choice")[0]


def test_names_are_no_markup() -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    cluster = dataclasses.replace(load_cluster("dgx-a100"), title="[/x] [bold]mine", currency="[/USD]")
    load = workload(65536, 16)
    print_plan(plan(Estimator(cluster, load), [64], Goal()), Evidence(cluster), load, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[/x] [bold]mine" in text
    assert "[/USD]" in text


@pytest.mark.parametrize("name", cluster_names())
def test_every_value_of_a_shipped_file_is_shown_with_its_source(name: str) -> None:
    content = cluster_text(name)[0]
    console = Console(width=200, file=io.StringIO())
    values = cluster_as_data(content)
    print_cluster(read_cluster(content, name), values, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert len(values) >= 10
    for entry in values:
        assert entry["key"] in text
        assert entry["source"][:40] in text
    # A number without a source vouches for itself; everything uncertain says why.
    assert all(entry["source"] for entry in values if entry["certainty"] in ("assumed", "unknown", "derived"))


def test_every_predicted_row_and_the_groups(tmp_path: Path) -> None:
    console = Console(width=80, soft_wrap=True, file=io.StringIO())
    validation = validate_rows(written(tmp_path, 20.8))
    print_validation(validation, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "nvidia 2.0 dgxa100_n64_mx" in text
    assert text.count("nvidia 2.0 dgxa100") == sum(row.rule != "pairs" for row in validation.results)
    assert "larger, GPU, own stack" in text
    assert "not predicted" in text
    rows = [line for line in text.splitlines() if line.startswith("nvidia")]
    assert max(map(len, rows)) <= 80
    assert all("[" in line for line in rows)


def run_folder(folder: Path, factor: float, workers: int = 64, steps_factor: float = 1.0) -> Path:
    """A run whose compute took `factor` of what its plan said, after five slow steps."""
    load = workload()
    result = plan(Estimator(laboratory(), load), [64], Goal())
    (folder / "plan.json").write_text(json.dumps(plan_as_data(result, "laboratory")), encoding="utf-8")
    parts = result.chosen.step_time.parts
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
    print_comparison(compare(read_run(folder)), out)
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


def test_svg_png_and_the_numbers_behind_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the figure is an extra")
    result = plan(Estimator(laboratory(), workload()), [64, 128], Goal())
    for name in ("one", "two"):
        draw_plan(result, "laboratory", tmp_path / f"{name}.svg")
    for suffix in (".svg", ".png", ".csv"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    rows = list(csv.DictReader((tmp_path / "one.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == len(result.candidates)
    assert sum(int(row["chosen"]) for row in rows) == 1
