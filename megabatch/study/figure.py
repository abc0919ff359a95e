"""The figures of a study and its page: every arm with every seed, accuracy by batch size, steps to a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megabatch.files import write_atomically
from megabatch.plan.convergence import ConvergenceLaw
from megabatch.report.figure import Axis, Figure, Mark, Missing, Series, Value, run_color
from megabatch.report.page import summary_page
from megabatch.study.results import ArmResult
from megabatch.study.targets import BatchPoint

_COLUMNS = ("arm", "n", "mean_percent", "std_points", "steps", "against", "difference_points", "p", "verdict")
_LOST_POINTS = 6.0  # arms this far below the best would squeeze all others together: they are drawn at the edge


def by_arm(results: Sequence[ArmResult], title: str, margin_points: float) -> Figure:
    """Every arm: seeds as points, mean and standard deviation as a bar, the baseline's margin as a band."""
    caption, band = "Points: seeds; bars: mean and standard deviation", None
    if (reference := _reference(results)) is not None:
        mean = reference.spread.mean
        band = (mean - margin_points) / 100, (mean + margin_points) / 100
        caption += f"; band: {reference.arm.name} +- {margin_points:g} points"
    series = [
        _series(group or "arms", run_color(index), members, [one.arm.name for one in members], "points")
        for index, (group, members) in enumerate(_groups(results).items())
    ]
    arms = Axis("arm", "category", ticks=tuple((one.arm.name, one.arm.name) for one in results))
    axes = arms, _accuracy(results)
    return Figure("arms", f"{title}: every arm", f"{caption}.", *axes, tuple(series), horizontal=True, band=band)


def by_batch_size(results: Sequence[ArmResult], title: str, num_train: int | None = None) -> Figure | Missing:
    """Accuracy by largest global batch, one line per group that has two sizes."""
    lines = {
        group: sorted(members, key=_batch)
        for group, members in _groups(results).items()
        if group and len({_batch(member) for member in members}) > 1
    }
    if not lines:
        return Missing("batch_sizes", "Accuracy by batch size", "no group of arms has two batch sizes")
    series = [
        _series(group, run_color(index), members, [_batch(one) for one in members], "line")
        for index, (group, members) in enumerate(lines.items())
    ]
    sizes = sorted({_batch(member) for members in lines.values() for member in members})
    words = [f"{size:,}" + (f" ({100 * size / num_train:g} %)" if num_train else "") for size in sizes]
    share = " (share of the training set)" if num_train else ""
    batches = Axis(f"global batch, images a step{share}", "log2", ticks=tuple(zip(sizes, words, strict=True)))
    caption = "Faint points: seeds; lines and bars: mean and standard deviation."
    axes = batches, _accuracy(results)
    return Figure("batch_sizes", f"{title}: accuracy by batch size", caption, *axes, tuple(series))


def by_target(points: Sequence[BatchPoint], laws: dict[str, ConvergenceLaw | str], title: str, target: float) -> Figure:
    """Steps to the target by batch on log axes: medians, perfect scaling, the law and its critical batch."""
    series: list[Series] = []
    marks: list[tuple[float, str]] = []
    for index, group in enumerate(dict.fromkeys(point.group for point in points)):
        own = [point for point in points if point.group == group and math.isfinite(point.steps)]
        if not own:
            continue
        own.sort(key=lambda point: point.global_batch_size)
        name, color, batches = group or "arms", run_color(index), tuple(p.global_batch_size for p in own)
        n, steps = tuple(p.num_runs for p in own), tuple(p.steps for p in own)
        series.append(Series(name, color, batches, steps, mark="points", n=n))
        perfect = tuple(steps[0] * batches[0] / batch for batch in batches)
        of_perfect = f"{name}: perfect scaling from its smallest batch"
        series.append(Series(of_perfect, color, batches, perfect, "ideal", dashed=True))
        law = laws.get(group)
        if law is not None and not isinstance(law, str):
            images_an_epoch = own[0].images / own[0].epochs
            fitted = tuple(law.at(batch).epochs * images_an_epoch / batch for batch in batches)
            critical = law.critical_batch
            told = f"critical batch {critical:,.0f}" if math.isfinite(critical) else "perfect scaling"
            series.append(Series(f"{name}: law, {told}", color, batches, fitted, "ideal"))
            if batches[0] <= critical <= batches[-1]:
                marks.append((critical, f"critical batch of {name}"))
    sizes = sorted({point.global_batch_size for point in points})
    x = Axis("global batch, images a step", "log2", ticks=tuple((size, f"{size:,}") for size in sizes))
    y = Axis(f"median steps until top-1 reaches {target:g} %", "log2")
    caption = (
        "Medians of all seeds; a run that did not arrive counts as later than all others. "
        "Dashed: perfect scaling; line: the fitted law."
    )
    return Figure("targets", f"{title}: steps to {target:g} %", caption, x, y, tuple(series), tuple(marks))


def write_page(
    path: Path, title: str, said: Sequence[str], found: Sequence[Figure | Missing], rows: Sequence[dict[str, Any]]
) -> None:
    """Write the report of a study; `rows` are those of `arms.csv`, which has more columns."""
    table = [{key: row[key] for key in _COLUMNS} for row in rows]
    words = {"name": path.parent.name, "word": "study", "made_by": "megabatch study"}
    write_atomically(path, summary_page(title, said, found, {"Every arm": table}, **words))


def _groups(results: Sequence[ArmResult]) -> dict[str, list[ArmResult]]:
    groups: dict[str, list[ArmResult]] = {}
    for result in results:
        groups.setdefault(result.arm.group, []).append(result)
    return groups


def _series(name: str, color: str, members: Sequence[ArmResult], x: Sequence[Value], mark: Mark) -> Series:
    """Means with their standard deviations and the seeds behind them, as parts of one."""
    means = [one.spread.mean / 100 for one in members]
    stds = [one.spread.std / 100 if math.isfinite(one.spread.std) else 0.0 for one in members]
    return Series(
        name,
        color,
        tuple(x),
        tuple(means),
        mark=mark,
        low=tuple(mean - std for mean, std in zip(means, stds, strict=True)),
        high=tuple(mean + std for mean, std in zip(means, stds, strict=True)),
        n=tuple(one.spread.n for one in members),
        single=tuple(tuple(run.percent / 100 for run in one.runs) for one in members),
    )


def _accuracy(results: Sequence[ArmResult]) -> Axis:
    best = max(result.spread.mean for result in results)
    return Axis("top-1 accuracy", percent=True, floor=(best - _LOST_POINTS) / 100)


def _reference(results: Sequence[ArmResult]) -> ArmResult | None:
    """The arm most others are held against."""
    names = [result.arm.against for result in results]
    most = max(set(names), key=names.count)
    return next((result for result in results if result.arm.name == most), None)


def _batch(result: ArmResult) -> int:
    return max(result.runs[0].global_batch_size_first, result.runs[0].global_batch_size_last)
