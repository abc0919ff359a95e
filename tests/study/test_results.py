"""From run folders to rows: what is read, compared and left out."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megabatch.errors import DataError
from megabatch.study.plan import Study, from_file
from megabatch.study.results import (
    arm_rows,
    arms_table,
    collect,
    left_out,
    number_of_run,
    statements,
)
from megabatch.text import csv_of_tables

ACCURACIES = {"small": [0.80, 0.82, 0.84], "large-2x": [0.70, 0.71]}


def write_run(folder: Path, top1: float, status: str = "finished") -> None:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(
        json.dumps(
            {
                "status": status,
                "top1": top1,
                "ensemble_top1": top1 + 0.01,
                "steps": 20,
                "epoch": 2.0,
                "training_seconds": 1.5,
                "workers": 1,
                "skipped_steps": 0,
            }
        )
    )


@pytest.fixture
def study(study_file: Path, tmp_path: Path) -> Study:
    for arm, values in ACCURACIES.items():
        for seed, value in enumerate(values):
            write_run(tmp_path / arm / f"seed-{seed}", value)
    return from_file(study_file)


def test_arms_are_collected_and_compared(study: Study, tmp_path: Path) -> None:
    small, large, ensemble = collect(study, tmp_path)
    assert small.spread.n == 3
    assert small.spread.mean == pytest.approx(82.0)
    assert small.spread.std == pytest.approx(float(np.std([80, 82, 84], ddof=1)))
    assert small.comparison is None
    assert large.comparison is not None
    assert large.comparison.difference == pytest.approx(-11.5)
    assert large.comparison.verdict(study.margin_points) == "worse"
    assert ensemble.comparison is not None
    assert ensemble.comparison.difference == pytest.approx(1.0)
    assert [run.seed for run in small.runs] == [0, 1, 2]
    assert {run.global_batch_size_first for run in large.runs} == {128}
    # Each is the only one held against its arm.
    assert large.p_holm == large.comparison.p


def test_what_is_not_finished_is_left_out(study_file: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "small" / "seed-0", 0.8)
    write_run(tmp_path / "small" / "seed-1", 0.9, status="stopped")
    write_run(tmp_path / "large-2x" / "seed-7", 0.9)  # no seed of this study
    (only,) = collect(from_file(study_file), tmp_path)
    assert [run.percent for run in only.runs] == [80.0]
    assert "nothing can be said" in statements([only], 0.5)[0]
    assert math.isnan(only.spread.std)
    assert "80.00 (1)" in arms_table([only], 0.5)
    (said,) = left_out(from_file(study_file), [only])
    assert said.endswith("Small (1 of 3 finished); large 2x (0 of 2 finished); large 2x, ensemble (0 of 2 finished).")


def test_many_arms_without_runs_are_counted(tmp_path: Path) -> None:
    arms = "".join(f'[[arm]]\nname = "arm {number}"\n' for number in range(11))
    (tmp_path / "many.toml").write_text('title = "many"\nrecipe = "demo"\n' + arms)
    study = from_file(tmp_path / "many.toml")
    for seed in range(2):
        write_run(tmp_path / "arm-4" / f"seed-{seed}", 0.8)
    (said,) = left_out(study, collect(study, tmp_path))
    assert said.endswith(": arm 4 (2 of 3 finished); 10 arms without any.")


def test_nothing_is_said_about_missing_runs_when_there_are_none(study: Study, tmp_path: Path) -> None:
    assert left_out(study, collect(study, tmp_path)) == []


def test_rows_and_csv_say_the_same(study: Study, tmp_path: Path) -> None:
    results = collect(study, tmp_path)
    rows = arm_rows(results, study.margin_points)
    read = list(csv.DictReader(io.StringIO(csv_of_tables(rows))))
    assert [row["arm"] for row in read] == ["Small", "large 2x", "large 2x, ensemble"]
    assert float(read[1]["difference_points"]) == pytest.approx(-11.5)
    assert read[0]["against"] == ""
    assert json.loads(json.dumps(rows)) == rows  # no NaN: other programs read it
    runs = list(csv.DictReader(io.StringIO(csv_of_tables([asdict(run) for result in results for run in result.runs]))))
    assert [float(run["percent"]) for run in runs[:3]] == pytest.approx([80.0, 82.0, 84.0])


def test_the_table_and_what_it_says(study: Study, tmp_path: Path) -> None:
    results = collect(study, tmp_path)
    table = arms_table(results, study.margin_points)
    assert "| Small | 20 | 82.00 +- 2.00 (3) |  |  |  |  |" in table
    assert "| large 2x | 20 | 70.50 +- 0.71 (2) | Small | -11.50 [" in table
    said = statements(results, study.margin_points)
    assert said[0].startswith("2 comparisons by Welch's t-test, 2 seeds an arm")
    assert said[1].endswith("large 2x.")
    assert said[2].endswith("none.")


def test_a_metric_that_runs_do_not_have(study: Study, study_file: Path, tmp_path: Path) -> None:
    study_file.write_text(study_file.read_text().replace("ensemble_top1", "speed"))
    with pytest.raises(DataError, match="has no number 'speed', which arm 'large 2x, ensemble' looks at"):
        collect(from_file(study_file), tmp_path)


def test_what_a_run_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"status": "finished", "top1": 0.5}')
    assert number_of_run(tmp_path / "run", "top1") == 0.5
    assert number_of_run(tmp_path / "run", "ensemble.top1") is None
    assert number_of_run(tmp_path / "run", "speed") is None
    assert number_of_run(tmp_path / "run", "status") is None


def paired_study(study_file: Path, tmp_path: Path) -> Study:
    """Two arms whose seeds differ much, and from each other by 0.9, 1.0, 1.1 points."""
    head = study_file.read_text().split("[[arm]]")[0]
    study_file.write_text(
        head.replace("seeds = 2", "seeds = 3\npaired = true")
        + '[[arm]]\nname = "Small"\n[[arm]]\nname = "large"\nexpect = "worse"\nmargin_points = 3.0\n'
        + '[[arm]]\nname = "huge"\n'
    )
    for arm, values in {"small": [0.80, 0.70, 0.60], "large": [0.79, 0.691, 0.589], "huge": [0.1, 0.1, 0.1]}.items():
        for seed, value in enumerate(values):
            write_run(tmp_path / arm / f"seed-{seed}", value)
    return from_file(study_file, ["data.num_classes=10"])


def test_pairs_are_compared_seed_with_seed_each_with_its_margin(study_file: Path, tmp_path: Path) -> None:
    study = paired_study(study_file, tmp_path)
    (tmp_path / "huge" / "seed-0" / "summary.json").unlink()
    _, large, huge = collect(study, tmp_path)
    assert large.comparison is not None
    assert huge.comparison is not None
    half = 4.302653 * 0.1 / math.sqrt(3)  # the printed t of two degrees of freedom
    assert (large.comparison.low, large.comparison.high) == pytest.approx((-1 - half, -1 + half), abs=1e-5)
    assert large.verdict(0.5) == "worse, within the margin"
    assert huge.comparison.difference == pytest.approx(-55.0)  # of the two seeds that both have
    assert large.p_holm == pytest.approx(2 * large.comparison.p)  # one family of two
    said = statements([*collect(study, tmp_path)], study.margin_points, paired=True)
    assert said[0].startswith("2 comparisons of pairs with one seed by Student's t-test")
    assert said[2] == "Equal within the margin of each (whole 95 % interval inside): large (margin 3)."
    assert "(worse) | worse, within the margin |" in arms_table(collect(study, tmp_path), study.margin_points)


def test_a_run_that_diverged_counts_as_chance_and_is_named(study_file: Path, tmp_path: Path) -> None:
    study = paired_study(study_file, tmp_path)
    folder = tmp_path / "large" / "seed-1"
    (folder / "summary.json").unlink()
    rows = [{"step": n, "samples": 64 * n, "epoch": 0.1 * n, "applied": n < 3, "wall_seconds": n} for n in range(1, 14)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = collect(study, tmp_path)
    assert [(run.percent, run.diverged, run.steps) for run in results[1].runs] == [
        (79.0, False, 20),
        (10.0, True, 13),
        (58.9, False, 20),
    ]
    assert "Runs that diverged, counted as chance: large (1)." in statements(results, 0.5)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:12]))  # ten may be skipped
    assert len(collect(study, tmp_path)[1].runs) == 2
