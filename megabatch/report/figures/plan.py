"""What was predicted before the run beside what was measured in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megabatch.report.figure import Axis, Figure, Missing, Series
from megabatch.report.metrics import LEFT_OUT_UPDATES
from megabatch.report.run import Run
from megabatch.report.units import count_text, percent_text, seconds_text
from megabatch.report.untrusted import number, table

__all__ = ["predicted"]

_Measured = tuple[str, str, float | None, int, Callable[[float], str]]
TITLE = "Predicted against measured"


def predicted(runs: Sequence[Run]) -> Figure | Missing:
    """Time per update, throughput and training time of `plan.json` and of the run, both over the prediction."""
    if len(runs) > 1:
        return Missing("predicted", TITLE, "shown in the report of a single run")
    if not runs[0].plan:
        return Missing("predicted", TITLE, "the run followed no plan (megabatch plan, then train --plan)")
    prediction = table(runs[0].plan.get("prediction"))
    rows = []
    for key, label, measured, count, show in _measured(runs[0]):
        interval = table(prediction.get(key))
        low, middle, high = (number(interval.get(name)) for name in ("low", "middle", "high"))
        if middle is not None and middle > 0 and measured is not None:
            said = f"{label}: {show(middle)} predicted, {show(measured)} measured"
            rows.append((label, (low or middle) / middle, (high or middle) / middle, measured / middle, count, said))
    if not rows:
        return Missing("predicted", TITLE, "plan.json and the run have no number in common yet")
    labels, lows, highs, ratios, counts, said_all = zip(*rows, strict=True)
    ones = (1.0,) * len(rows)
    inside = sum(low <= ratio <= high for low, high, ratio in zip(lows, highs, ratios, strict=True))
    series = (
        Series("predicted, 80 % interval", "predicted", labels, ones, "simulated", "points", lows, highs),
        Series("measured", "speed", labels, ratios, "measured", "points", n=counts),
    )
    title = f"{labels[0].capitalize()} was {percent_text(ratios[0])} of the prediction"
    caption = (
        f"{'; '.join(said_all)}. {inside} of {len(rows)} lie in their interval. Medians leave out the first "
        f"{LEFT_OUT_UPDATES} updates. Everything is shown over the prediction."
    )
    x, y = Axis("quantity", "category"), Axis("over the prediction [%]", percent=True)
    return Figure("predicted", title, caption, x, y, series)


def _measured(run: Run) -> list[_Measured]:
    found: list[_Measured] = []
    for key, label, column, show in (
        ("step_seconds", "time per update", "update_seconds", seconds_text),
        ("compute_seconds", "compute", "compute_seconds", seconds_text),
        ("communication_and_waiting_seconds", "communication and waiting", "communication_seconds", seconds_text),
        ("data_seconds", "waiting for data", "data_seconds", seconds_text),
        ("images_per_second", "images per second", "images_per_second", count_text),
    ):
        values = run.metrics.columns.get(column)
        found.append((key, label, values.quantile(0.5) if values else None, len(values.sample) if values else 0, show))
    training = number(run.summary.get("training_seconds")) if run.is_finished else None
    found.append(("training_seconds", "training time", training, 1, seconds_text))
    return found
