"""What the runs of a study came to: one row per run, one row per arm, and each arm against another.

Accuracies are in percent, differences in points. Torch-free.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import DataError
from megabatch.report.run import read_json
from megabatch.schedule.batch import parse_stages
from megabatch.study.plan import Arm, Study
from megabatch.study.run import ENSEMBLE_FILE
from megabatch.study.statistics import Comparison, Spread, compare, holm, spread

__all__ = [
    "ArmResult",
    "RunResult",
    "arm_rows",
    "collect",
    "compared",
    "csv_text",
    "left_out",
    "markdown_table",
    "number_of_run",
    "statements",
]


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
        other = by_name.get(result.arm.against)
        if other is None or other is result:
            comparisons.append(None)
        else:
            comparisons.append(compare([r.percent for r in result.runs], [r.percent for r in other.runs]))
    adjusted = holm([c.p if c else math.nan for c in comparisons])
    return [
        ArmResult(result.arm, result.runs, result.spread, comparison, p)
        for result, comparison, p in zip(found, comparisons, adjusted, strict=True)
    ]


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
                "p_holm": _plain(result.p_holm, 6) if c else None,
                "verdict": c.verdict(margin_points) if c else None,
            }
        )
    return rows


def csv_text(rows: Sequence[dict[str, Any]] | Sequence[RunResult]) -> str:
    """The rows as CSV, a header first."""
    tables = [row if isinstance(row, dict) else asdict(row) for row in rows]
    out = io.StringIO()
    if tables:
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
    tested = [r for r in results if r.comparison is not None and not math.isnan(r.comparison.p)]
    if not tested:
        return ["No two arms have two finished runs each: nothing can be said about differences."]
    clear = [r.arm.name for r in tested if r.p_holm < 0.05]
    counts = [r.spread.n for r in tested]
    equal = [r.arm.name for r in tested if _inside(r, margin_points)]
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


def _inside(result: ArmResult, margin: float) -> bool:
    c = result.comparison
    return c is not None and -margin <= c.low and c.high <= margin


def _plain(value: float, digits: int = 4) -> float | None:
    return None if math.isnan(value) else round(value, digits)
