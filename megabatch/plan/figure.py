"""A plan as figures of the report: training time against cost with the front and the choice, and the parts of a step.

`--figure front.svg` writes front.svg, front.png and front.csv, which holds every candidate with all its numbers, and
the same three for front_parts.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Literal

from megabatch.files import write_atomically
from megabatch.plan.search import FLAT_ALGORITHMS, PlanResult
from megabatch.plan.show import duration
from megabatch.report.figure import Axis, Figure, Series, write_figures

__all__ = ["draw_plan", "front_figure", "parts_figure"]

_PARTS = {
    "compute": "compute",
    "exposed communication": "communication",
    "stragglers": "momentum",
    "loader": "data",
}
"""The parts of a step, and the report's colour of each."""
_MOST_BARS = 7


def draw_plan(result: PlanResult, cluster: str, path: Path) -> None:
    """Write `path` with the suffixes .svg, .png and .csv, and the parts of a step beside it."""
    stem = path.stem if path.suffix in (".svg", ".png", ".csv") else path.name
    write_figures([front_figure(result, cluster, stem), parts_figure(result, f"{stem}_parts")], path.parent)
    write_atomically(path.parent / f"{stem}.csv", _table(result))


def front_figure(result: PlanResult, cluster: str, key: str) -> Figure:
    """Training time against cost: a dot a candidate, numbers of workers along the front."""
    chosen, name = result.chosen, result.load.name
    series = []
    for algorithm in dict.fromkeys(one.candidate.algorithm for one in result.candidates):
        mine = [one for one in result.candidates if one.candidate.algorithm == algorithm]
        bills, seconds = tuple(one.bill.middle for one in mine), tuple(one.training.middle for one in mine)
        label = algorithm.replace("_", " ")
        series.append(Series(label, f"algorithm:{algorithm}", bills, seconds, "simulated", "points"))
    front = sorted(result.front, key=lambda one: one.bill.middle)
    bills, seconds = tuple(one.bill.middle for one in front), tuple(one.training.middle for one in front)
    label = "neither faster nor cheaper exists"
    series.append(Series(label, "ideal", bills, seconds, "simulated", dashed=True))
    training = chosen.training
    spread = ((chosen.bill.middle,), (training.middle,)), ((training.low,), (training.high,))
    series.append(Series("chosen, 80 % interval", "noise", *spread[0], "simulated", "points", *spread[1]))
    grid = "" if chosen.candidate.algorithm in FLAT_ALGORITHMS else f" {chosen.candidate.grid.text}"
    title = (
        f"{name} on {cluster}: {chosen.candidate.workers:,} workers, {chosen.candidate.algorithm}{grid}, "
        f"{training.middle:,.0f} s"
    )
    unit = f"cost [{chosen.currency}]" if chosen.cost is not None else "node hours"
    x = Axis(f"{unit}, initialisation included", _scale([one.bill.middle for one in result.candidates]))
    y = Axis("training time [s]", _scale([one.training.middle for one in result.candidates]))
    marks = tuple((one.bill.middle, f"{one.candidate.workers:,}") for one in front)
    caption = f"Best of every number of workers and algorithm; {result.num_considered:,} candidates priced."
    return Figure(key, title, caption, x, y, tuple(series), marks)


def parts_figure(result: PlanResult, key: str) -> Figure:
    """What a step consists of along the front, as parts of one."""
    front = sorted(result.front, key=lambda one: one.candidate.workers)
    drawn = front[-_MOST_BARS:]
    labels = tuple(f"{one.candidate.workers:,}\n{duration(one.step.middle)}" for one in drawn)
    series = []
    for part, color in _PARTS.items():
        heights = tuple(one.step_parts.get(part, 0.0) / one.step.middle for one in drawn)
        if any(heights):
            series.append(Series(part, color, labels, heights, "simulated", "bars", group="step"))
    cut = f", {len(drawn)} largest" if len(drawn) < len(front) else ""
    x, y = Axis("workers, time of a step", "category"), Axis("part of a step [%]", percent=True, from_zero=True)
    return Figure(key, f"Parts of a step, along the front{cut}", "Predicted.", x, y, tuple(series))


def _scale(values: list[float]) -> Literal["log", "linear"]:
    """Powers of ten need a few of them to show; near values do better without."""
    return "log" if max(values) > 5 * min(values) else "linear"


def _table(result: PlanResult) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ("workers", "algorithm", "grid", "bucket_mb", "batch", "step_seconds", "training_seconds", "training_low")
    writer.writerow([*head, "training_high", "node_hours", "cost", "front", "chosen"])
    for one in result.candidates:
        way = one.candidate
        numbers = (one.step.middle, one.training.middle, one.training.low, one.training.high, one.node_hours.middle)
        cost = f"{one.cost.middle:.6g}" if one.cost else ""
        marks = (int(one in result.front), int(one is result.chosen))
        row = (way.workers, way.algorithm, way.grid.text, way.bucket_mb, one.batch, *(f"{x:.6g}" for x in numbers))
        writer.writerow([*row, cost, *marks])
    return text.getvalue()
