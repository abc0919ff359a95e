"""From run folders to rows: what is read, compared and left out.

Comparisons of few runs are held against printed tables, direct integration, earlier numbers and simulated runs.
"""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from megabatch.errors import DataError
from megabatch.study.plan import Study, from_file
from megabatch.study.results import (
    Comparison,
    arm_rows,
    collect,
    compare,
    csv_text,
    holm,
    left_out,
    markdown_table,
    number_of_run,
    spread,
    statements,
)

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
    # Two comparisons: the smaller p is doubled.
    assert large.p_holm == pytest.approx(2 * large.comparison.p)


def test_what_is_not_finished_is_left_out(study_file: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "small" / "seed-0", 0.8)
    write_run(tmp_path / "small" / "seed-1", 0.9, status="stopped")
    write_run(tmp_path / "large-2x" / "seed-7", 0.9)  # no seed of this study
    (only,) = collect(from_file(study_file), tmp_path)
    assert [run.percent for run in only.runs] == [80.0]
    assert "nothing can be said" in statements([only], 0.5)[0]
    assert math.isnan(only.spread.std)
    assert "80.00 (1)" in markdown_table([only], 0.5)
    (said,) = left_out(from_file(study_file), [only])
    assert said.endswith("Small (1 of 3 finished); large 2x (0 of 2 finished); large 2x, ensemble (0 of 2 finished).")


def test_nothing_is_said_about_missing_runs_when_there_are_none(study: Study, tmp_path: Path) -> None:
    assert left_out(study, collect(study, tmp_path)) == []


def test_rows_and_csv_say_the_same(study: Study, tmp_path: Path) -> None:
    results = collect(study, tmp_path)
    rows = arm_rows(results, study.margin_points)
    read = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [row["arm"] for row in read] == ["Small", "large 2x", "large 2x, ensemble"]
    assert float(read[1]["difference_points"]) == pytest.approx(-11.5)
    assert read[0]["against"] == ""
    assert json.loads(json.dumps(rows)) == rows  # no NaN: other programs read it
    runs = list(csv.DictReader(io.StringIO(csv_text([run for result in results for run in result.runs]))))
    assert [float(run["percent"]) for run in runs[:3]] == pytest.approx([80.0, 82.0, 84.0])


def test_the_table_and_what_it_says(study: Study, tmp_path: Path) -> None:
    results = collect(study, tmp_path)
    table = markdown_table(results, study.margin_points)
    assert "| Small | 20 | 82.00 +- 2.00 (3) |  |  |  |  |" in table
    assert "| large 2x | 20 | 70.50 +- 0.71 (2) | Small | -11.50 [" in table
    said = statements(results, study.margin_points)
    assert said[0].startswith("2 comparisons by Welch's t-test, 2 to 2 seeds an arm")
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


# Printed in every table of Student's t (two-sided 5 %, three decimals).
TABLE_975 = {2: 4.303, 4: 2.776, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "t"), TABLE_975.items())
def test_intervals_have_the_width_of_the_printed_table(freedom: int, t: float) -> None:
    """Two arms of n runs with one spread have 2(n - 1) degrees of freedom."""
    n = freedom // 2 + 1
    values = [math.sin(index) for index in range(n)]
    result = compare(values, [value - 1.0 for value in values])
    error = spread(values).std * math.sqrt(2 / n)
    assert (result.high - result.low) / 2 / error == pytest.approx(t, abs=5.1e-4)


@pytest.mark.parametrize(
    ("values", "others", "low", "high", "p"),
    [
        ([90.09, 91.25], [89.22, 89.8], -2.852743241441086, 5.172743241441108, 0.2585321337078239),
        ([89.74, 89.74, 91.9], [89.55, 89.49, 89.72], -2.1857282106478286, 3.9323948773144983, 0.348787801099689),
        (
            [91.13, 89.97, 90.59],
            [89.21, 89.39, 89.37, 89.1, 89.05, 89.01, 89.43],
            -0.031232777617508978,
            2.7121851585699,
            0.05230632227724005,
        ),
        ([1.0, 1.0], [2.0, 2.1], -1.6853102368086188, -0.41468976319138084, 0.03029234437673632),
    ],
)
def test_numbers_of_an_implementation_without_scipy(
    values: list[float], others: list[float], low: float, high: float, p: float
) -> None:
    result = compare(values, others)
    assert (result.low, result.high, result.p) == pytest.approx((low, high, p), rel=1e-9)


def test_spread() -> None:
    assert spread([1.0, 2.0, 6.0]).mean == 3.0
    assert spread([1.0, 2.0, 6.0]).std == pytest.approx(float(np.std([1, 2, 6], ddof=1)))
    assert (spread([1.0, 2.0, 6.0]).low, spread([1.0, 2.0, 6.0]).high) == (1.0, 6.0)
    assert math.isnan(spread([5.0]).std)


def test_welch_by_hand() -> None:
    """n = 3 and 3, variances 1 and 4: error^2 = 5/3, degrees (5/3)^2 / (1/18 + 16/18) = 50/17, t = 5 / sqrt(5/3)."""
    result = compare([11.0, 12.0, 13.0], [5.0, 7.0, 9.0])
    error, freedom = math.sqrt(5 / 3), 50 / 17
    assert result.difference == 5.0
    assert result.p == pytest.approx(2 * _below(-5 / error, freedom), abs=1e-9)
    assert _below((result.high - 5.0) / error, freedom) == pytest.approx(0.975, abs=1e-9)
    assert 5.0 - result.low == pytest.approx(result.high - 5.0)


def _below(t: float, freedom: float) -> float:
    """The probability that a Student t is at most t, by the integral of its density."""
    grid = np.linspace(0.0, t, 200_001)
    norm = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = norm * (1 + grid**2 / freedom) ** (-(freedom + 1) / 2)
    return 0.5 + float(np.trapezoid(density, grid))


def test_intervals_hold_what_they_say_and_false_alarms_are_one_in_twenty() -> None:
    rng = np.random.default_rng(0)
    held = alarms = 0
    for _ in range(2000):
        one, two = rng.normal(1.0, 1.0, 5), rng.normal(0.0, 1.0, 5)
        result = compare(one.tolist(), two.tolist())
        held += result.low <= 1.0 <= result.high
        alarms += compare((one - 1.0).tolist(), two.tolist()).p < 0.05
    assert 0.94 < held / 2000 < 0.965
    assert 0.035 < alarms / 2000 < 0.06


def test_too_few_runs_and_no_spread() -> None:
    lonely = compare([1.0], [2.0, 3.0])
    assert lonely.difference == -1.5
    assert math.isnan(lonely.p)
    assert lonely.verdict(9.0) == "too few runs to say"
    assert compare([1.0, 1.0], [1.0, 1.0]).p == 1.0
    assert compare([1.0, 1.0], [2.0, 2.0]).verdict(0.5) == "worse"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-2.0, -0.1, "worse"),
        (-0.4, -0.1, "worse, within the margin"),
        (-0.4, 0.3, "equal within the margin"),
        (-0.4, 0.9, "not worse by more than the margin"),
        (-0.6, 0.9, "undecided"),
        (-0.6, 0.1, "undecided"),
        (0.1, 0.9, "better"),
        (0.1, 0.4, "better, within the margin"),
    ],
)
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert Comparison((low + high) / 2, low, high, 0.5).verdict(0.5) == verdict


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    mixed = holm([math.nan, 0.02])
    assert math.isnan(mixed[0])
    assert mixed[1] == 0.02
    assert holm([]) == []
