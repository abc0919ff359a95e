"""What the runs of a study came to: one row per run, one row per arm, and each arm against another.

Accuracies are in percent, differences in points. Torch-free.

Two arms are compared by Welch's t-test: a difference of means, its 95 % interval and a p value, without assuming that
both arms spread alike. What the interval says is put into one word (`Comparison.verdict`), so that "no difference was
found" is never mistaken for "they are equal": with three seeds an interval is wide, and an arm only counts as being
within a margin of another when the whole interval lies inside it.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scipy.special import stdtr, stdtrit  # Student's distribution and its inverse

from megabatch.errors import DataError
from megabatch.report.run import read_json
from megabatch.schedule.batch import parse_stages
from megabatch.study.plan import Arm, Study
from megabatch.study.run import ENSEMBLE_FILE

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """n values: mean, standard deviation of one value (n - 1 in the denominator; NaN for one value), extremes."""

    n: int
    mean: float
    std: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """One arm less another: difference of means, its 95 % interval, two-sided p. NaN where n is too small to say."""

    difference: float
    low: float
    high: float
    p: float

    def is_inside(self, margin: float) -> bool:
        """Whether the whole interval lies within the margin."""
        return -margin <= self.low and self.high <= margin

    def verdict(self, margin: float) -> str:
        """What the interval says: a difference, equality within the margin, or neither."""
        if math.isnan(self.low):
            return "too few runs to say"
        inside = self.is_inside(margin)
        if self.high < 0:
            return "worse, within the margin" if inside else "worse"
        if self.low > 0:
            return "better, within the margin" if inside else "better"
        if inside:
            return "equal within the margin"
        return "not worse by more than the margin" if self.low >= -margin else "undecided"


@dataclass(frozen=True)
class RunResult:
    """One finished run, seen through the metric of an arm."""

    arm: str
    seed: int
    percent: float
    steps: int
    epochs: float
    global_batch_size_first: int
    global_batch_size_last: int
    training_seconds: float
    workers: int
    skipped_steps: int


@dataclass(frozen=True)
class ArmResult:
    """An arm with its finished runs, and how it compares with the arm it is held against (None: with itself)."""

    arm: Arm
    runs: tuple[RunResult, ...]
    spread: Spread
    comparison: Comparison | None = None
    p_holm: float = math.nan

    @property
    def steps(self) -> float:
        return sum(run.steps for run in self.runs) / len(self.runs)


def collect(study: Study, output: Path) -> list[ArmResult]:
    """Read the finished runs of every arm that has any; runs still missing are left out."""
    settings = {run.key: run.config for run in study.runs()}
    found: list[ArmResult] = []
    for arm in study.arms:
        runs = []
        for run in study.runs_of(arm):
            path = output / run / "summary.json"
            if run not in settings or not path.is_file():
                continue
            summary = read_json(path)
            if summary["status"] != "finished":
                continue
            value = number_of_run(output / run, arm.metric)
            if value is None:
                raise DataError(f"'{path}' has no number '{arm.metric}', which arm '{arm.name}' looks at; name another")
            totals = parse_stages(settings[run].train.global_batch_size).global_batch_sizes
            runs.append(
                RunResult(
                    arm=arm.name,
                    seed=settings[run].train.seed,
                    percent=100.0 * value,
                    steps=summary["steps"],
                    epochs=summary["epoch"],
                    global_batch_size_first=totals[0],
                    global_batch_size_last=totals[-1],
                    training_seconds=summary["training_seconds"],
                    workers=summary["workers"],
                    skipped_steps=summary["skipped_steps"],
                )
            )
        if runs:
            found.append(ArmResult(arm, tuple(runs), spread([run.percent for run in runs])))
    return compared(found)


def number_of_run(folder: Path, metric: str) -> float | None:
    """The value of a metric: a key of the run's summary, or `part.key` of its ensemble; None when it has none."""
    part, dot, key = metric.partition(".")
    if dot and not (folder / ENSEMBLE_FILE).is_file():
        return None
    table: Any = read_json(folder / ENSEMBLE_FILE).get(part) if dot else read_json(folder / "summary.json")
    value = table.get(key or part) if isinstance(table, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def compared(found: Sequence[ArmResult]) -> list[ArmResult]:
    """Each arm against the one it names, where that has finished runs too; p values also adjusted for their number."""
    by_name = {result.arm.name: result for result in found}
    comparisons: list[Comparison | None] = []
    for result in found:
        other = by_name.get(result.arm.against, result)
        values, others = ([run.percent for run in one.runs] for one in (result, other))
        comparisons.append(compare(values, others) if other is not result else None)
    adjusted = holm([c.p if c else math.nan for c in comparisons])
    return [replace(one, comparison=c, p_holm=p) for one, c, p in zip(found, comparisons, adjusted, strict=True)]


def spread(values: Sequence[float]) -> Spread:
    """Mean and spread of at least one value."""
    n = len(values)
    mean = math.fsum(values) / n
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) if n > 1 else math.nan
    return Spread(n, mean, std, min(values), max(values))


def compare(values: Sequence[float], others: Sequence[float]) -> Comparison:
    """Welch's t-test of `values` against `others` (Welch 1947): the arms may differ in number and in spread."""
    one, two = spread(values), spread(others)
    difference = one.mean - two.mean
    if one.n < 2 or two.n < 2:
        return Comparison(difference, math.nan, math.nan, math.nan)
    variance_one, variance_two = one.std**2 / one.n, two.std**2 / two.n
    error = math.sqrt(variance_one + variance_two)
    if error == 0:
        return Comparison(difference, difference, difference, 1.0 if difference == 0 else 0.0)
    # Satterthwaite's degrees of freedom. `scipy.stats.ttest_ind` is not used: it warns when an arm has no spread.
    freedom = error**4 / (variance_one**2 / (one.n - 1) + variance_two**2 / (two.n - 1))
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(stdtr(freedom, -abs(difference) / error))
    return Comparison(difference, difference - half, difference + half, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values made larger for being many (Holm 1979): any of those below 0.05 stands at 5 % for all together."""
    order = sorted(range(len(p_values)), key=lambda i: (math.isnan(p_values[i]), p_values[i]))
    tested = sum(not math.isnan(p) for p in p_values)
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for place, index in enumerate(order[:tested]):
        largest = max(largest, min(1.0, (tested - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def arm_rows(results: Sequence[ArmResult], margin_points: float) -> list[dict[str, Any]]:
    """One row per arm, for CSV and JSON; None where there is nothing to say."""
    rows = []
    for result in results:
        c = result.comparison
        rows.append(
            {
                "arm": result.arm.name,
                "group": result.arm.group,
                "metric": result.arm.metric,
                "n": result.spread.n,
                "mean_percent": round(result.spread.mean, 4),
                "std_points": _plain(result.spread.std),
                "lowest_percent": round(result.spread.low, 4),
                "highest_percent": round(result.spread.high, 4),
                "steps": round(result.steps, 1),
                "against": result.arm.against if c else None,
                "difference_points": _plain(c.difference) if c else None,
                "interval95_low": _plain(c.low) if c else None,
                "interval95_high": _plain(c.high) if c else None,
                "p_welch": _plain(c.p, 6) if c else None,
                "p_holm": _plain(result.p_holm, 6),
                "verdict": c.verdict(margin_points) if c else None,
            }
        )
    return rows


def csv_text(rows: Sequence[dict[str, Any]] | Sequence[RunResult]) -> str:
    """At least one row as CSV, a header first."""
    tables = [row if isinstance(row, dict) else asdict(row) for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(tables[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(tables)
    return out.getvalue()


def markdown_table(results: Sequence[ArmResult], margin_points: float) -> str:
    """The arms as a table for people: mean +- std (n), difference with its 95 % interval, p, and what that says."""
    lines = [
        "| arm | steps | top-1 %, mean +- std (n) | less | difference, 95 % interval | p | so it is |",
        "| --- | ---: | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        s, c = result.spread, result.comparison
        std = "" if math.isnan(s.std) else f" +- {s.std:.2f}"
        cells = [result.arm.name, f"{result.steps:,.0f}", f"{s.mean:.2f}{std} ({s.n})"]
        if c is None:
            cells += ["", "", "", ""]
        else:
            interval = "" if math.isnan(c.low) else f" [{c.low:+.2f}, {c.high:+.2f}]"
            p = "" if math.isnan(c.p) else ("< 0.001" if c.p < 0.001 else f"{c.p:.3f}")
            cells += [result.arm.against, f"{c.difference:+.2f}{interval}", p, c.verdict(margin_points)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def statements(results: Sequence[ArmResult], margin_points: float) -> list[str]:
    """What the comparisons say, and how far they can be trusted."""
    tested = [(r, r.comparison) for r in results if r.comparison is not None and not math.isnan(r.comparison.p)]
    if not tested:
        return ["No two arms have two finished runs each: nothing can be said about differences."]
    clear = [r.arm.name for r, _ in tested if r.p_holm < 0.05]
    counts = [r.spread.n for r, _ in tested]
    equal = [r.arm.name for r, comparison in tested if comparison.is_inside(margin_points)]
    alone = "intervals and p are those of each comparison alone"
    return [
        f"{len(tested)} comparisons by Welch's t-test, {min(counts)} to {max(counts)} seeds an arm; {alone}.",
        f"Different also when all comparisons are taken together (Holm, 5 %): {'; '.join(clear) or 'none'}.",
        f"Equal within {margin_points:g} points (whole 95 % interval inside): {'; '.join(equal) or 'none'}.",
    ]


def left_out(study: Study, results: Sequence[ArmResult]) -> list[str]:
    """Which arms lack runs, as a statement: runs that diverge are missing runs, and the mean of the rest flatters."""
    finished = {result.arm.name: result.spread.n for result in results}
    lacking = [arm for arm in study.arms if finished.get(arm.name, 0) < arm.seeds]
    if not lacking:
        return []
    told = "; ".join(f"{arm.name} ({finished.get(arm.name, 0)} of {arm.seeds} finished)" for arm in lacking)
    return [f"Not all runs are in, failed ones are not counted and may be the worst: {told}."]


def _plain(value: float, digits: int = 4) -> float | None:
    return None if math.isnan(value) else round(value, digits)
