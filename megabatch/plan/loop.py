"""Closing the loop: what a plan said beside what the run that followed it measured, part by part.

Per update the run measures compute, communication and waiting for data, as means over workers. A worker that waits
for a slower one waits inside the all-reduce, so the plan's stragglers are compared together with its exposed
communication.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megabatch.errors import DataError
from megabatch.plan.planfile import read_plan
from megabatch.report.record import read_json, read_metrics

__all__ = ["LEFT_OUT_UPDATES", "PartComparison", "compare_run", "print_comparison"]

LEFT_OUT_UPDATES = 3

_PER_UPDATE = (
    ("update", "step_seconds", "update_seconds"),
    ("compute", "compute_seconds", "compute_seconds"),
    ("communication and waiting", "communication_and_waiting_seconds", "communication_seconds"),
    ("waiting for data", "data_seconds", "data_seconds"),
)


@dataclass(frozen=True, slots=True)
class PartComparison:
    """One part in seconds (images/s: per second); low and high are the plan's 80 % interval."""

    part: str
    predicted: float
    low: float
    high: float
    measured: float
    num_measured: int

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def ratio(self) -> float:
        """Measured over predicted; infinite when nothing was predicted."""
        return self.measured / self.predicted if self.predicted else float("inf")


def compare_run(folder: Path) -> list[PartComparison]:
    """Compare the plan of a run with its metrics; medians over all updates but the first few.

    The time of the whole training is compared only if the run made as many updates as the plan counted.

    Raises:
        DataError, ConfigError: the run followed no plan, or has too few updates.
    """
    if not (folder / "plan.json").is_file():
        raise DataError(f"run '{folder}' has no plan.json; it followed no plan, see `megabatch train --plan`")
    prediction = read_plan(folder / "plan.json").prediction
    rows = list(read_metrics(folder / "metrics.jsonl"))
    most = max((row.get("batch_total", 0) for row in rows), default=0)
    steady = [row for row in rows[LEFT_OUT_UPDATES:] if row.get("batch_total") == most] or rows[LEFT_OUT_UPDATES:]
    if not steady:
        raise DataError(
            f"run '{folder}' has {len(rows)} updates; at least {LEFT_OUT_UPDATES + 1} are needed to compare"
        )
    found = [
        _compared(part, prediction, key, [row[column] for row in steady if column in row])
        for part, key, column in (*_PER_UPDATE, ("images/s", "images_per_second", "images_per_second"))
    ]
    summary = read_json(folder / "summary.json")
    if summary.get("status") == "finished" and summary.get("updates") == prediction.get("updates"):
        found.append(_compared("training", prediction, "training_seconds", [summary["wall_seconds"]]))
    return [one for one in found if one is not None]


def print_comparison(comparison: Sequence[PartComparison], console: Console | None = None) -> None:
    """A table for people."""
    out = console or Console(highlight=False)
    table = Table("part", "predicted [80 %]", "measured", "ratio", "n", "in", box=None, pad_edge=False)
    for column in table.columns[1:5]:
        column.justify = "right"
    for one in comparison:
        unit = 1.0 if one.part in ("images/s", "training") else 1e3
        ratio = "-" if one.ratio == float("inf") else f"{one.ratio:.2f}"
        table.add_row(
            one.part if unit == 1.0 else f"{one.part}, ms",
            f"{unit * one.predicted:.4g} [{unit * one.low:.4g} {unit * one.high:.4g}]",
            f"{unit * one.measured:.4g}",
            ratio,
            str(one.num_measured),
            "yes" if one.inside else "NO",
        )
    out.print(table)


def _compared(part: str, prediction: dict[str, Any], key: str, values: Sequence[float]) -> PartComparison | None:
    said = prediction.get(key)
    if not isinstance(said, dict) or not values:
        return None
    middle, low, high = (float(said[name]) for name in ("middle", "low", "high"))
    return PartComparison(part, middle, low, high, statistics.median(values), len(values))
