"""The figures of a study: every arm with every seed's point, and accuracy by batch size. Same results, same SVG.

matplotlib is loaded only when a figure is drawn; it comes with `pip install megabatch[figures]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch.files import write_atomically
from megabatch.plan.convergence import ConvergenceLaw
from megabatch.report.figure import RUN_COLORS, drawing_files
from megabatch.study.results import ArmResult
from megabatch.study.targets import BatchPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = tuple(light for light, _ in RUN_COLORS)
_LOST_POINTS = 6.0  # arms this far below the best would squeeze all others together: they are drawn at the edge
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def draw_arms(results: Sequence[ArmResult], title: str, margin_points: float) -> Figure:
    """One line per arm: seeds as points, mean and standard deviation as a bar, the baseline's margin as a band."""
    figure, axes = _new(width=9.0, height=1.2 + 0.32 * len(results))
    groups = list(dict.fromkeys(result.arm.group for result in results))
    best = max(result.spread.mean for result in results)
    edge = best - _LOST_POINTS
    reference = _reference(results)
    if reference is not None:
        mean = reference.spread.mean
        axes.axvspan(mean - margin_points, mean + margin_points, color="#e8edf5", zorder=0)
        axes.axvline(mean, color="#9fb3d1", linewidth=1, zorder=1)
    for place, result in enumerate(results):
        color = _COLORS[groups.index(result.arm.group) % len(_COLORS)]
        values = [run.percent for run in result.runs]
        shown = [max(value, edge) for value in values]
        below = [place + 0.22] * len(shown)
        axes.plot(shown, below, "o", color=color, alpha=0.55, markersize=4, mew=0, zorder=2)
        if result.spread.mean >= edge:
            std = 0.0 if math.isnan(result.spread.std) else result.spread.std
            axes.errorbar(
                result.spread.mean, place, xerr=std, fmt="|", color=color, markersize=11, mew=2, capsize=3, zorder=3
            )
        else:
            axes.annotate(
                f"{result.spread.mean:.1f} %, off the scale", (edge, place), (7, -3), textcoords="offset points", size=8
            )
    axes.set_yticks(range(len(results)), [result.arm.name for result in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    label = "top-1 accuracy, %\n(points: seeds; bars: mean and standard deviation"
    band = f"; band: {reference.arm.name} +- {margin_points:g} points" if reference else ""
    axes.set_xlabel(f"{label}{band})", size=9)
    axes.set_title(title, loc="left", size=11)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.tick_params(axis="y", labelsize=9)
    return figure


def draw_batch_sizes(results: Sequence[ArmResult], title: str, num_train: int | None = None) -> Figure | None:
    """Accuracy by largest global batch, one line per group; None when no group has two sizes."""
    groups: dict[str, list[ArmResult]] = {}
    for result in results:
        groups.setdefault(result.arm.group, []).append(result)
    lines = {
        group: sorted(members, key=_batch)
        for group, members in groups.items()
        if group and len({_batch(member) for member in members}) > 1
    }
    if not lines:
        return None
    figure, axes = _new(width=7.5, height=4.4)
    sizes = sorted({_batch(member) for members in lines.values() for member in members})
    edge = max(result.spread.mean for result in results) - _LOST_POINTS
    for index, (group, members) in enumerate(lines.items()):
        color, mark = _COLORS[index % len(_COLORS)], _MARKS[index % len(_MARKS)]
        shift = 1.0 + 0.018 * (index - (len(lines) - 1) / 2)  # so that bars of equal sizes do not hide each other
        x = [_batch(member) * shift for member in members]
        means = [max(member.spread.mean, edge) for member in members]
        for position, member in zip(x, members, strict=True):
            if member.spread.mean < edge:
                note = f"{member.spread.mean:.1f} %,\noff the scale"
                axes.annotate(note, (position, edge), (-8, 2), textcoords="offset points", ha="right", size=8)
        stds = [
            member.spread.std if member.spread.mean >= edge and math.isfinite(member.spread.std) else 0.0
            for member in members
        ]
        axes.errorbar(x, means, yerr=stds, color=color, marker=mark, markersize=6, capsize=3, label=group, zorder=3)
        for position, member in zip(x, members, strict=True):
            points = [max(run.percent, edge) for run in member.runs]
            axes.plot([position] * len(points), points, mark, color=color, alpha=0.35, markersize=3.5, mew=0)
    axes.set_xscale("log", base=2)
    labels = [f"{size:,}" + (f"\n{100 * size / num_train:g} %" if num_train else "") for size in sizes]
    axes.set_xticks(sizes, labels)
    axes.minorticks_off()
    axes.set_xlabel("global batch, images a step" + (" and share of the training set" if num_train else ""))
    axes.set_ylabel("top-1 accuracy, %")
    axes.set_title(title, loc="left", size=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_targets(
    points: Sequence[BatchPoint], laws: dict[str, ConvergenceLaw | str], title: str, target: float
) -> Figure:
    """Steps to the target by batch on log axes: medians, perfect scaling, the law and its critical batch."""
    figure, axes = _new(width=7.5, height=4.8)
    known = [point for point in points if math.isfinite(point.steps)]
    for index, group in enumerate(dict.fromkeys(point.group for point in points)):
        color, mark = _COLORS[index % len(_COLORS)], _MARKS[index % len(_MARKS)]
        own = sorted((p for p in known if p.group == group), key=lambda p: p.global_batch_size)
        batches = [p.global_batch_size for p in own]
        axes.plot(batches, [p.steps for p in own], mark, color=color, label=group or "arms", zorder=3)
        if own:
            perfect = [own[0].steps * batches[0] / batch for batch in batches]
            axes.plot(batches, perfect, ":", color=color, label="perfect scaling from its smallest batch")
        law = laws.get(group)
        if own and law is not None and not isinstance(law, str):
            images_an_epoch = own[0].images / own[0].epochs
            fitted = [law.at(batch).epochs * images_an_epoch / batch for batch in batches]
            law_text = (
                f"critical batch {law.critical_batch:,.0f}" if math.isfinite(law.critical_batch) else "perfect scaling"
            )
            axes.plot(batches, fitted, "-", color=color, label=f"law, {law_text}")
            if batches[0] <= law.critical_batch <= batches[-1]:
                axes.axvline(law.critical_batch, color=color, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    sizes = sorted({p.global_batch_size for p in points})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("global batch, images a step")
    axes.set_ylabel(f"median steps until top-1 reaches {target:g} %")
    axes.set_title(title, loc="left", size=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """Write the figure as SVG and PNG beside each other; SVG bytes depend on nothing but the results."""
    paths = []
    for suffix, content in drawing_files(figure).items():
        paths.append(path.with_suffix(f".{suffix}"))
        write_atomically(paths[-1], content)
    return paths


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    # No global state of pyplot, no window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes: Any = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _reference(results: Sequence[ArmResult]) -> ArmResult | None:
    """The arm most others are held against."""
    names = [result.arm.against for result in results]
    most = max(set(names), key=names.count)
    return next((result for result in results if result.arm.name == most), None)


def _batch(result: ArmResult) -> int:
    return max(result.runs[0].global_batch_size_first, result.runs[0].global_batch_size_last)
