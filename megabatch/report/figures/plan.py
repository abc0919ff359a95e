"""What was predicted before the run beside what was measured in it."""

from __future__ import annotations

from collections.abc import Sequence

from megabatch.errors import DataError
from megabatch.report.figure import Axis, Figure, Missing, Series
from megabatch.report.plan_compare import PartComparison, compare
from megabatch.report.run import Run
from megabatch.report.units import count_text, percent_text, seconds_text

__all__ = ["predicted"]

TITLE = "Predicted against measured"
_LABELS = {"step": "time per step", "images/s": "images per second", "training": "training time"}


def predicted(runs: Sequence[Run]) -> Figure | Missing:
    """The parts of a step, throughput and training time of `plan.json` and of the run, over the prediction."""
    if len(runs) > 1:
        return Missing("predicted", TITLE, "shown in the report of a single run")
    if not runs[0].plan and not any(one.startswith("plan.json") for one in runs[0].problems):
        return Missing("predicted", TITLE, "the run followed no plan (megabatch plan, then train --plan)")
    try:
        found = compare(runs[0])
    except DataError as error:
        return Missing("predicted", TITLE, str(error))
    drawn = [one for one in found.parts if one.predicted > 0]
    if not drawn:
        return Missing("predicted", TITLE, "plan.json and the run have no number above 0 in common")
    labels = tuple(_label(one) for one in drawn)
    series = (
        Series(
            "predicted, 80 % interval",
            "predicted",
            labels,
            (1.0,) * len(drawn),
            "simulated",
            "points",
            tuple(one.low / one.predicted for one in drawn),
            tuple(one.high / one.predicted for one in drawn),
        ),
        Series(
            "measured",
            "speed",
            labels,
            tuple(one.ratio for one in drawn),
            "measured",
            "points",
            n=tuple(one.num_measured for one in drawn),
        ),
    )
    title = f"{labels[0].capitalize()} was {percent_text(drawn[0].ratio)} of the prediction"
    if found.differences:
        title += ", which was for another run"
    sentences = [
        found.difference_line,
        "; ".join(_said(one) for one in found.parts),
        f"{sum(one.inside for one in found.parts)} of {len(found.parts)} lie in their interval",
        found.medians_line,
        found.remark,
        "Everything is drawn over its prediction" + (", if that is above 0" if len(drawn) < len(found.parts) else ""),
    ]
    caption = " ".join(f"{one[0].upper()}{one[1:]}." for one in sentences if one)
    x, y = Axis("quantity", "category"), Axis("over the prediction [%]", percent=True)
    return Figure("predicted", title, caption, x, y, series)


def _label(one: PartComparison) -> str:
    return _LABELS.get(one.part, one.part)


def _said(one: PartComparison) -> str:
    show = count_text if one.part == "images/s" else seconds_text
    before = show(one.predicted) if one.predicted else f"none (at most {show(one.high)})"
    return f"{_label(one)}: {before} predicted, {show(one.measured)} measured"
