"""The plan as an image: training time against cost, the front, the choice with its 80 % interval; and the parts
of it.

Writes .svg, .png and the .csv behind them. matplotlib is imported here only, with its file-writing backend.
"""

from __future__ import annotations

import csv
import io
import warnings
from pathlib import Path

from megabatch.errors import ConfigError
from megabatch.files import write_atomically
from megabatch.plan.cluster import Cluster
from megabatch.plan.planner import PlanResult
from megabatch.plan.predict import Prediction
from megabatch.plan.search import FLAT_ALGORITHMS
from megabatch.plan.show import duration
from megabatch.plan.workload import Workload
from megabatch.report.figure import ALGORITHM_COLORS

__all__ = ["draw_plan"]

_PARTS = ("compute", "exposed communication", "stragglers", "loader")
_PART_COLOURS = ("#4c72b0", "#dd8452", "#c44e52", "#937860")


def draw_plan(result: PlanResult, cluster: Cluster, workload: Workload, path: Path) -> None:
    """Write `path` with the suffixes .svg, .png and .csv."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.ticker import FuncFormatter
    except ImportError:
        raise ConfigError("a figure needs matplotlib, which is not installed; pip install matplotlib") from None
    stem = path.with_suffix("") if path.suffix in (".svg", ".png", ".csv") else path
    money = result.chosen.cost is not None
    unit = f"cost, {result.chosen.currency}" if money else "node hours"
    with matplotlib.rc_context(
        {"svg.hashsalt": "megabatch", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), width_ratios=(3, 2))
        for name in dict.fromkeys(one.candidate.algorithm for one in result.candidates):
            mine = [one for one in result.candidates if one.candidate.algorithm == name]
            colour = ALGORITHM_COLORS.get(name, ("black", ""))[0]
            # What is on the front lies above what it beats, however near.
            for on_front, size, zorder in ((False, 16, 3), (True, 40, 4)):
                dots = [one for one in mine if (one in result.front) == on_front]
                left.scatter(
                    [_bill(one) for one in dots], [_seconds(one) for one in dots], s=size, color=colour, zorder=zorder
                )
            left.scatter([], [], s=30, color=colour, label=name.replace("_", " "))
        front = sorted(result.front, key=_bill)
        left.plot(
            [_bill(one) for one in front],
            [_seconds(one) for one in front],
            color="black",
            linewidth=0.8,
            linestyle=":",
            label="neither faster nor cheaper exists",
        )
        for one in front:
            left.annotate(
                f"{one.candidate.workers:,}",
                (_bill(one), one.training.middle),
                textcoords="offset points",
                xytext=(-4, -10),
                ha="right",
                fontsize=7,
            )
        chosen = result.chosen
        left.errorbar(
            [_bill(chosen)],
            [chosen.training.middle],
            yerr=[[chosen.training.middle - chosen.training.low], [chosen.training.high - chosen.training.middle]],
            fmt="D",
            color="#d62728",
            capsize=4,
            markersize=7,
            label="chosen, 80 % interval",
            zorder=5,
        )
        left.set(
            xscale=_scale([_bill(one) for one in result.candidates]),
            yscale=_scale([_seconds(one) for one in result.candidates]),
            xlabel=f"{unit} (initialisation included)",
            ylabel="training time, seconds",
        )
        for axis in (left.xaxis, left.yaxis):
            axis.set_major_formatter(FuncFormatter(_plain))
            axis.set_minor_formatter(FuncFormatter(_plain_minor))
        left.grid(alpha=0.25, which="both")
        left.legend(fontsize=7, frameon=False)
        flat = chosen.candidate.algorithm in FLAT_ALGORITHMS
        grid = "" if flat else f" {chosen.candidate.grid.text}"
        left.set_title(
            f"{workload.name} on {cluster.name}: {chosen.candidate.workers:,} workers, "
            f"{chosen.candidate.algorithm}{grid}, {chosen.training.middle:,.0f} s",
            loc="left",
        )
        shown = sorted(front, key=lambda one: one.candidate.workers)[-7:]
        bottom = [0.0] * len(shown)
        labels = [f"{one.candidate.workers:,}\n{duration(one.step.middle)}" for one in shown]
        for part, colour in zip(_PARTS, _PART_COLOURS, strict=True):
            heights = [100 * one.step_parts.get(part, 0.0) / one.step.middle for one in shown]
            if any(heights):
                right.bar(labels, heights, bottom=bottom, color=colour, label=part, width=0.7)
                bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        right.set(ylabel="per cent of a step", ylim=(0, 100), xlabel="workers, time of a step")
        cut = f", {len(shown)} largest" if len(shown) < len(front) else ""
        right.set_title(f"parts of a step, along the front{cut}", loc="left", pad=22)
        right.tick_params(axis="x", labelsize=7)
        right.legend(fontsize=7, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderpad=0)
        figure.tight_layout()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a font without some glyph is no reason to stop
            for suffix, metadata in ((".svg", {"Date": None}), (".png", {"Software": None})):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=suffix[1:], dpi=140, metadata=metadata)
                write_atomically(stem.with_suffix(suffix), buffer.getvalue())
        pyplot.close(figure)
    write_atomically(stem.with_suffix(".csv"), _table(result))


def _scale(values: list[float]) -> str:
    """Powers of ten need a few of them to show; near values do better without."""
    return "log" if max(values) > 5 * min(values) else "linear"


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:,.10g}"


def _plain_minor(value: float, _position: int | None = None) -> str:
    """Label 2 and 5 between the powers of ten; the rest would crowd."""
    return f"{value:,.10g}" if f"{value:e}"[0] in "25" else ""


def _seconds(one: Prediction) -> float:
    return one.training.middle


def _bill(one: Prediction) -> float:
    return one.cost.middle if one.cost is not None else one.node_hours.middle


def _table(result: PlanResult) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["workers", "algorithm", "grid", "bucket_mb", "batch", "step_seconds", "training_seconds", "training_low"]
    writer.writerow([*head, "training_high", "node_hours", "cost", "front", "chosen"])
    for one in result.candidates:
        writer.writerow(
            [
                one.candidate.workers,
                one.candidate.algorithm,
                one.candidate.grid.text,
                one.candidate.bucket_mb,
                one.batch,
                f"{one.step.middle:.6g}",
                f"{one.training.middle:.6g}",
                f"{one.training.low:.6g}",
                f"{one.training.high:.6g}",
                f"{one.node_hours.middle:.6g}",
                f"{one.cost.middle:.6g}" if one.cost else "",
                int(one in result.front),
                int(one is result.chosen),
            ]
        )
    return text.getvalue()
