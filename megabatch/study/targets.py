"""Steps, images and seconds until top-1 first reaches a target, by global batch (Shallue 2019, McCandlish 2018).

A run arrives at its first evaluation with the target or more. One that never does is censored: all that is known is
that it needs more than it made, so it counts as later than all others. The median of an arm stands as long as more
than half of its runs arrive, wherever the others would have; otherwise the arm has none. Medians by batch are fitted
with

    S(B) = S_min (1 + B_crit / B)        steps; in epochs E(B) = E_min (1 + B / B_crit), the planner's law
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import DataError
from megabatch.plan.convergence import STUDY_TABLE, ConvergenceLaw, fit_law, median_with_censored
from megabatch.report.metrics_log import read_metrics
from megabatch.report.run import METRICS_FILE
from megabatch.study.results import ArmResult
from megabatch.text import markdown_table

TARGETS_FILE = STUDY_TABLE
_FAR = 10  # times the largest batch: a critical batch beyond that is not determined


@dataclass(frozen=True)
class Arrival:
    """A run and its first evaluation with the target; None where it has none. made_steps: all its steps."""

    arm: str
    group: str
    seed: int
    global_batch_size: int
    target_percent: float
    made_steps: int
    steps_to_target: int | None
    images_to_target: int | None
    epochs_to_target: float | None
    seconds_to_target: float | None


@dataclass(frozen=True)
class BatchPoint:
    """An arm's medians; infinite where half of its runs or more did not arrive."""

    arm: str
    group: str
    global_batch_size: int
    num_runs: int
    num_arrived: int
    steps: float
    images: float
    epochs: float
    seconds: float


def arrivals_of(results: Sequence[ArmResult], folders: dict[tuple[str, int], Path], target: float) -> list[Arrival]:
    """Every run of arms with a fixed batch; folders: by arm and seed. target: in per cent."""
    found = []
    for result in results:
        for run in result.runs:
            if run.global_batch_size_first != run.global_batch_size_last:
                continue
            rows = read_metrics(folders[run.arm, run.seed] / METRICS_FILE)
            row: dict[str, Any] = next((row for row in rows if 100.0 * row.get("val_top1", -1.0) >= target), {})
            found.append(
                Arrival(
                    arm=run.arm,
                    group=result.arm.group,
                    seed=run.seed,
                    global_batch_size=run.global_batch_size_last,
                    target_percent=target,
                    made_steps=run.steps,
                    steps_to_target=row.get("step"),
                    images_to_target=row.get("samples"),
                    epochs_to_target=row.get("epoch"),
                    seconds_to_target=row.get("wall_seconds"),
                )
            )
    return found


def points_of(arrivals: Sequence[Arrival]) -> list[BatchPoint]:
    """The medians of every arm, in the order of the arms."""
    points = []
    for arm in dict.fromkeys(arrival.arm for arrival in arrivals):
        own = [arrival for arrival in arrivals if arrival.arm == arm]
        points.append(
            BatchPoint(
                arm=arm,
                group=own[0].group,
                global_batch_size=own[0].global_batch_size,
                num_runs=len(own),
                num_arrived=sum(arrival.steps_to_target is not None for arrival in own),
                steps=median_with_censored([arrival.steps_to_target for arrival in own]),
                images=median_with_censored([arrival.images_to_target for arrival in own]),
                epochs=median_with_censored([arrival.epochs_to_target for arrival in own]),
                seconds=median_with_censored([arrival.seconds_to_target for arrival in own]),
            )
        )
    return points


def laws_of(points: Sequence[BatchPoint]) -> dict[str, ConvergenceLaw | str]:
    """The law of every group with a name or, where its points determine none, the reason."""
    laws: dict[str, ConvergenceLaw | str] = {}
    for group in dict.fromkeys(point.group for point in points if point.group):
        known = [p for p in points if p.group == group and math.isfinite(p.epochs)]
        try:
            laws[group] = fit_law([(p.global_batch_size, p.epochs) for p in known], f"group '{group}'")
        except DataError as error:
            laws[group] = str(error)
    return laws


def target_lines(points: Sequence[BatchPoint], laws: dict[str, ConvergenceLaw | str], target: float) -> list[str]:
    """A table for people, and a sentence about the law of each group."""
    lines = [
        f"Median steps, images and seconds until top-1 first reached {target:g} %; a run that did not arrive counts as",
        "later than all others.",
        "",
    ]
    head, rows = ("arm", "batch", "arrived", "steps", "images", "seconds"), []
    for p in points:
        cells = [_shown(p.steps, 0), _shown(p.images, 0), _shown(p.seconds, 1)]
        rows.append([p.arm, f"{p.global_batch_size:,}", f"{p.num_arrived} of {p.num_runs}", *cells])
    lines += markdown_table(head, rows, numbers=head[1:]).split("\n")
    for group, law in laws.items():
        lines.append(f"{group}: {law if isinstance(law, str) else _told(law)}")
    return lines


def _told(law: ConvergenceLaw) -> str:
    if law.critical_batch > _FAR * law.batches[1]:
        return (
            f"images to the target hardly grow up to a batch of {law.batches[1]:,.0f}: the critical batch is far larger"
        )
    return (
        f"critical batch {law.critical_batch:,.0f} images (there twice the images of a small batch are needed), fitted "
        f"to batches of {law.batches[0]:,.0f} to {law.batches[1]:,.0f}; points lie {law.scatter:.0%} off the law"
    )


def _shown(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "not reached"
