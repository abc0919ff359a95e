"""What the runs of a study came to: one row per run, one row per arm, and each arm against another.

Accuracies are in percent, differences in points. Torch-free.

A run that diverged is a result too: it counts as chance. A run that is missing is left out, and `left_out` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megabatch.config import Config
from megabatch.errors import DataError
from megabatch.report.run import ENSEMBLE_FILE, SUMMARY_FILE, read_json
from megabatch.schedule.batch import parse_stages
from megabatch.study.compare import Comparison, Spread, compare, compare_pairs, holm, spread
from megabatch.study.earlier import EarlierRuns, RunResult
from megabatch.study.plan import Arm, Study
from megabatch.study.run import divergence
from megabatch.text import markdown_table

_MANY_ARMS = 8  # without any run are counted, not named


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

    def is_equal(self, margin_points: float) -> bool:
        """Whether the whole interval lies inside the margin, the arm's own if it has one."""
        return self.comparison is not None and self.comparison.is_inside(self.arm.margin_points or margin_points)

    def verdict(self, margin_points: float) -> str | None:
        """What the comparison says, with the arm's own margin if it has one."""
        return self.comparison.verdict(self.arm.margin_points or margin_points) if self.comparison else None


def collect(study: Study, output: Path, earlier: EarlierRuns | None = None) -> list[ArmResult]:
    """Read the finished runs of every arm that has any; runs still missing are left out.

    earlier: results whose run folders are gone; DataError where such a run is there too and came to something else.
    """
    settings = {run.key: run.config for run in study.runs()}
    found: list[ArmResult] = []
    for arm in study.arms:
        runs = {seed: row for (name, seed), row in (earlier or {}).items() if name == arm.name}
        for run in study.runs_of(arm):
            path = output / run / SUMMARY_FILE
            if run not in settings:
                continue
            diverged = divergence(output / run, settings[run])
            if diverged is None and not (path.is_file() and read_json(path)["status"] == "finished"):
                continue
            summary = diverged.summary if diverged else read_json(path)
            value = chance(settings[run]) if diverged else number_of_run(output / run, arm.metric)
            if value is None:
                raise DataError(f"'{path}' has no number '{arm.metric}', which arm '{arm.name}' looks at; name another")
            totals = parse_stages(settings[run].train.global_batch_size).global_batch_sizes
            row = RunResult(
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
                diverged=diverged is not None,
            )
            if (known := runs.setdefault(row.seed, row)).percent != row.percent:
                raise DataError(
                    f"arm '{arm.name}', seed {row.seed}: '{output / run}' has {row.percent:g} %, the earlier result is "
                    f"{known.percent:g} %; take out the one that is not of this study"
                )
        if runs:
            by_seed = tuple(runs[seed] for seed in sorted(runs))
            found.append(ArmResult(arm, by_seed, spread([run.percent for run in by_seed])))
    return compared(found, study.paired)


def chance(config: Config) -> float:
    """The share of images that a guess gets right; 0 where the settings do not say how many classes there are."""
    data = config.data
    classes = data.generated.num_classes if data.source == "generated" else data.num_classes
    return 1 / classes if classes else 0.0


def number_of_run(folder: Path, metric: str) -> float | None:
    """The value of a metric: a key of the run's summary, or `part.key` of its ensemble; None when it has none."""
    part, dot, key = metric.partition(".")
    if dot and not (folder / ENSEMBLE_FILE).is_file():
        return None
    table: Any = read_json(folder / ENSEMBLE_FILE).get(part) if dot else read_json(folder / SUMMARY_FILE)
    value = table.get(key or part) if isinstance(table, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def compared(found: Sequence[ArmResult], paired: bool = False) -> list[ArmResult]:
    """Each arm against the one it names, where that has runs too; p also adjusted (Holm) for all against that one.

    paired: seed with seed; a seed that only one of both has is left out.
    """
    by_name = {result.arm.name: result for result in found}
    comparisons: list[Comparison | None] = []
    for result in found:
        other = by_name.get(result.arm.against, result)
        one, two = ({run.seed: run.percent for run in each.runs} for each in (result, other))
        if other is result:
            comparisons.append(None)
        elif paired:
            seeds = [seed for seed in one if seed in two]
            pairs = [one[seed] for seed in seeds], [two[seed] for seed in seeds]
            comparisons.append(compare_pairs(*pairs, result.arm.expect) if seeds else None)
        else:
            comparisons.append(compare(list(one.values()), list(two.values()), result.arm.expect))
    adjusted = [math.nan] * len(found)
    for against in {result.arm.against for result in found}:
        family = [i for i, result in enumerate(found) if result.arm.against == against]
        p_values = [c.p if (c := comparisons[i]) else math.nan for i in family]
        for i, p in zip(family, holm(p_values), strict=True):
            adjusted[i] = p
    return [replace(one, comparison=c, p_holm=p) for one, c, p in zip(found, comparisons, adjusted, strict=True)]


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
                "p": _plain(c.p, 6) if c else None,
                "expected": result.arm.expect or None,
                "p_holm": _plain(result.p_holm, 6),
                "margin_points": result.arm.margin_points or margin_points,
                "verdict": result.verdict(margin_points),
                "diverged_runs": sum(run.diverged for run in result.runs),
            }
        )
    return rows


def arms_table(results: Sequence[ArmResult], margin_points: float) -> str:
    """The arms as a table for people: mean +- std (n), difference with its 95 % interval, p, and what that says."""
    head = ["arm", "steps", "top-1 %, mean +- std (n)", "less", "difference, 95 % interval", "p", "so it is"]
    rows = []
    for result in results:
        s, c = result.spread, result.comparison
        std = "" if math.isnan(s.std) else f" +- {s.std:.2f}"
        cells = [result.arm.name, f"{result.steps:,.0f}", f"{s.mean:.2f}{std} ({s.n})"]
        if c is None:
            cells += ["", "", "", ""]
        else:
            interval = "" if math.isnan(c.low) else f" [{c.low:+.2f}, {c.high:+.2f}]"
            p = "" if math.isnan(c.p) else ("< 0.001" if c.p < 0.001 else f"{c.p:.3f}")
            p += f" ({result.arm.expect})" if p and result.arm.expect else ""
            cells += [result.arm.against, f"{c.difference:+.2f}{interval}", p, str(result.verdict(margin_points))]
        rows.append(cells)
    return markdown_table(head, rows, numbers=("steps",))


def statements(results: Sequence[ArmResult], margin_points: float, paired: bool = False) -> list[str]:
    """What the comparisons say, and how far they can be trusted."""
    tested = [(r, r.comparison) for r in results if r.comparison is not None and not math.isnan(r.comparison.p)]
    if not tested:
        return ["No two arms have two finished runs each: nothing can be said about differences."]
    clear = [r.arm.name for r, _ in tested if r.p_holm < 0.05]
    counts = [r.spread.n for r, _ in tested]
    margins = {r.arm.margin_points or margin_points for r, _ in tested}
    equal = [
        r.arm.name + (f" (margin {r.arm.margin_points or margin_points:g})" if len(margins) > 1 else "")
        for r, _ in tested
        if r.is_equal(margin_points)
    ]
    how = "of pairs with one seed by Student's t-test" if paired else "by Welch's t-test"
    alone = "intervals and p are those of each comparison alone"
    seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    within = f"{margins.pop():g} points" if len(margins) == 1 else "the margin of each"
    said = [
        f"{len(tested)} comparisons {how}, {seeds} seeds an arm; {alone}.",
        f"Different also when all comparisons with one arm are taken together (Holm, 5 %): {_listed(clear)}.",
        f"Equal within {within} (whole 95 % interval inside): {_listed(equal)}.",
    ]
    diverged = {r.arm.name: count for r in results if (count := sum(run.diverged for run in r.runs))}
    told = "; ".join(f"{name} ({count})" for name, count in diverged.items())
    return [*said, f"Runs that diverged, counted as chance: {told}."] if diverged else said


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names) or "none"


def left_out(study: Study, results: Sequence[ArmResult]) -> list[str]:
    """Which arms lack runs, as a statement: runs that diverge are missing runs, and the mean of the rest flatters."""
    finished = {result.arm.name: result.spread.n for result in results}
    lacking = [arm for arm in study.arms if finished.get(arm.name, 0) < arm.seeds]
    if not lacking:
        return []
    begun = [arm for arm in lacking if arm.name in finished]
    named = lacking if len(lacking) - len(begun) <= _MANY_ARMS else begun
    listed = [f"{arm.name} ({finished.get(arm.name, 0)} of {arm.seeds} finished)" for arm in named]
    listed += [f"{len(lacking) - len(begun)} arms without any"] * (named is begun)
    return [f"Not all runs are in, failed ones are not counted and may be the worst: {'; '.join(listed)}."]


def _plain(value: float, digits: int = 4) -> float | None:
    return None if math.isnan(value) else round(value, digits)
