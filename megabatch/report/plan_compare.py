"""A plan beside the run that followed it: what was predicted, what was measured, and where the run is not the plan's.

One comparison serves `megabatch plan --compare` and the report. Per step the run measures compute, communication and
waiting for data, as means over workers; compared are medians over steps of the batch that the plan priced, without
the first few. A worker that waits for a slower one waits inside the all-reduce, so the plan's stragglers are compared
together with its exposed communication. The plan counts evaluations, so the whole training is the run's wall clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megabatch.errors import DataError
from megabatch.files import parse_toml
from megabatch.report.figure import Axis, Figure, Missing, Series
from megabatch.report.metrics import LEFT_OUT_STEPS, Column, iterate_rows
from megabatch.report.run import METRICS_FILE, PLAN_FILE, Run, setting
from megabatch.report.untrusted import items, number, table, text
from megabatch.text import count_text, percent_text, seconds_text

_PER_STEP = (
    ("step", "step_seconds", "step_seconds"),
    ("compute", "compute_seconds", "compute_seconds"),
    ("communication and waiting", "communication_and_waiting_seconds", "communication_seconds"),
    ("waiting for data", "data_seconds", "data_seconds"),
    ("images/s", "images_per_second", "images_per_second"),
)

_ALLOWANCE = 0.02
"""Of a step: what a part that was predicted as 0 may take. Its own interval has no width, a clock has."""

_SAME_STEPS = 0.02
"""Epochs to a target are rounded up when they are followed; a run that differs by more is another training."""

_MAX_BATCHES = 64
_OF_NO_ACCOUNT = ("data.path", "log.", "reference.")


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
        return self.measured / self.predicted if self.predicted else math.inf


@dataclass(frozen=True)
class PlanComparison:
    """The parts, and in words what the run did otherwise than planned; `remark` says what could not be compared.

    global_batch_size: of the steps that the parts are medians of; 0 when the run does not tell.
    """

    parts: tuple[PartComparison, ...]
    differences: tuple[str, ...] = ()
    remark: str = ""
    global_batch_size: float = 0.0

    @property
    def difference_line(self) -> str:
        """A sentence for people; empty when the run is the plan's."""
        return f"the run differs from its plan: {', '.join(self.differences)}" if self.differences else ""

    @property
    def medians_line(self) -> str:
        """A sentence for people: over which steps."""
        of = f" of {self.global_batch_size:,.0f} images" if self.global_batch_size else ""
        return f"medians over steps{of}, the first {LEFT_OUT_STEPS} of the run left out"

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"parts": [asdict(part) | {"inside": part.inside} for part in self.parts]}


def compare(run: Run) -> PlanComparison:
    """Compare a run with the plan it followed; DataError without a plan, a prediction or enough steps."""
    if not run.plan:
        for problem in run.problems:
            if problem.startswith(PLAN_FILE):
                raise DataError(f"{problem} in run '{run.name}'; put the plan that it followed back there")
        raise DataError(
            f"run '{run.name}' has no plan.json, it followed no plan; make one with `megabatch plan --output` and "
            "train with --plan"
        )
    prediction = table(run.plan.get("prediction"))
    said = {key: found for _, key, _ in _PER_STEP if (found := _interval(prediction.get(key))) is not None}
    if not said:
        raise DataError(
            f"plan.json of run '{run.name}' holds no prediction of a step; put the plan that it followed back there"
        )
    batch, columns = _steady(run, _planned_batch(run.plan, said))
    if not columns:
        why = next((f" ({one})" for one in run.problems if one.startswith(METRICS_FILE)), "")
        raise DataError(
            f"run '{run.name}' has {run.metrics.num_rows} steps{why}; at least {LEFT_OUT_STEPS + 1} are needed to "
            "compare it with its plan"
        )
    measured_step = columns["step_seconds"].quantiles() if "step_seconds" in columns else None
    step = said["step_seconds"][0] if "step_seconds" in said else measured_step.middle if measured_step else 0.0
    parts = []
    for part, key, name in _PER_STEP:
        measured = columns[name].quantiles() if name in columns else None
        if key in said and measured is not None:
            middle, low, high = said[key]
            high = max(high, _ALLOWANCE * step) if middle == 0 else high
            parts.append(PartComparison(part, middle, low, high, measured.middle, measured.n))
    training, remark = _training(run, prediction)
    return PlanComparison((*parts, *training), _differences(run, batch, said), remark, batch)


def _interval(value: Any) -> tuple[float, float, float] | None:
    """(middle, low, high), or None when it is no such thing."""
    middle, low, high = (number(table(value).get(name)) for name in ("middle", "low", "high"))
    if middle is None or middle < 0:
        return None
    return middle, middle if low is None else low, middle if high is None else high


def _planned_batch(plan: dict[str, Any], said: dict[str, tuple[float, float, float]]) -> tuple[float, float] | None:
    """(global batch of the step that was priced, how far a run's may lie from it: it takes whole ghost batches)."""
    if "step_seconds" not in said or "images_per_second" not in said:
        return None
    batch = float(round(said["step_seconds"][0] * said["images_per_second"][0]))
    ghost = number(table(plan.get("settings")).get("train.ghost_batch_size")) or 0.0
    return batch, max(0.01 * batch, ghost - 1)


def _steady(run: Run, planned: tuple[float, float] | None) -> tuple[float, dict[str, Column]]:
    """The global batch to compare at, and its columns: the planned one, or else the one with most steps."""
    by_batch: dict[float, dict[str, Column]] = {}
    counts: dict[float, int] = {}
    try:
        for index, row in enumerate(iterate_rows(run.folder / METRICS_FILE)):
            batch = number(row.get("global_batch_size")) or 0.0
            if index < LEFT_OUT_STEPS or (batch not in by_batch and len(by_batch) >= _MAX_BATCHES):
                continue
            columns = by_batch.setdefault(batch, {})
            counts[batch] = counts.get(batch, 0) + 1
            for _, _, name in _PER_STEP:
                value = number(row.get(name))
                if value is not None:
                    columns.setdefault(name, Column()).add(index, index, value, 0)
    except OSError:
        return 0.0, {}  # `run.problems` says it
    near = [batch for batch in counts if planned and abs(batch - planned[0]) <= planned[1]]
    chosen = max(near or counts, key=lambda batch: (counts[batch], batch), default=0.0)
    return chosen, by_batch.get(chosen, {})


def _training(run: Run, prediction: dict[str, Any]) -> tuple[list[PartComparison], str]:
    """The whole training, if the run is finished and made about as many steps as the plan counted; else why not."""
    said, planned = _interval(prediction.get("training_seconds")), number(prediction.get("steps"))
    steps, seconds = number(run.summary.get("steps")), number(run.summary.get("wall_seconds"))
    if said is None or planned is None:
        return [], ""
    if not run.is_finished or steps is None or seconds is None:
        return [], "the time of the whole training is not compared: the run is not finished"
    if abs(steps - planned) > max(1.0, _SAME_STEPS * planned):
        counts = f"the run made {steps:,.0f} steps, the plan counted {planned:,.0f}"
        return [], f"the time of the whole training is not compared: {counts}"
    return [PartComparison("training", *said, seconds, 1)], ""


def _differences(run: Run, batch: float, said: dict[str, tuple[float, float, float]]) -> tuple[str, ...]:
    """What the run did otherwise than its plan, each in a few words."""
    found = []
    planned_workers, workers = number(run.plan.get("workers")), run.world_size
    if planned_workers and workers and planned_workers != workers:
        found.append(f"{workers:,} worker{'s' if workers > 1 else ''} instead of {planned_workers:,.0f}")
    planned_grid = text(run.plan.get("grid"), 40)
    if planned_grid and run.grid_text and planned_grid != run.grid_text and planned_workers == workers:
        found.append(f"grid {run.grid_text} instead of {planned_grid}")
    for name, wanted in _planned_settings(run.plan).items():
        had = setting(run, name)
        if had is not None and not name.startswith(_OF_NO_ACCOUNT) and not _same(had, wanted):
            found.append(f"{text(name, 60)} {_shown(had)} instead of {_shown(wanted)}")
    planned = _planned_batch(run.plan, said)
    is_told = any("global_batch_size" in one for one in found)
    if planned and batch and abs(batch - planned[0]) > planned[1] and not is_told:
        found.append(f"steps of {batch:,.0f} images instead of {planned[0]:,.0f}")
    return tuple(found)


def _planned_settings(plan: dict[str, Any]) -> dict[str, Any]:
    """Dotted names and values: what the user typed for the plan, then what the planner chose."""
    found: dict[str, Any] = {}
    for one in items(plan.get("overrides"), 1000):
        name, equals, value = text(one, 1000).partition("=")
        if equals:
            try:
                found[name.strip()] = parse_toml(f"value = {value}")["value"]
            except ValueError:
                found[name.strip()] = value.strip()
    return found | table(plan.get("settings"))


def _same(had: Any, wanted: Any) -> bool:
    ours, theirs = number(had), number(wanted)
    if ours is not None and theirs is not None:
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(had == wanted) or (not isinstance(had, dict | list) and text(had) == text(wanted))


def _shown(value: Any) -> str:
    found = number(value)
    return f"{found:g}" if found is not None and not float(found).is_integer() else text(value, 60) or "another"


_TITLE = "Predicted against measured"
_LABELS = {"step": "time per step", "images/s": "images per second", "training": "training time"}


def predicted(runs: Sequence[Run]) -> Figure | Missing:
    """The parts of a step, throughput and training time of `plan.json` and of the run, over the prediction."""
    if len(runs) > 1:
        return Missing("predicted", _TITLE, "shown in the report of a single run")
    if not runs[0].plan and not any(one.startswith(PLAN_FILE) for one in runs[0].problems):
        return Missing("predicted", _TITLE, "the run followed no plan (megabatch plan, then train --plan)")
    try:
        found = compare(runs[0])
    except DataError as error:
        return Missing("predicted", _TITLE, str(error))
    drawn = [one for one in found.parts if one.predicted > 0]
    if not drawn:
        return Missing("predicted", _TITLE, "plan.json and the run have no number above 0 in common")
    labels = tuple(_label(one) for one in drawn)
    low, high = tuple(one.low / one.predicted for one in drawn), tuple(one.high / one.predicted for one in drawn)
    ratios, counts = tuple(one.ratio for one in drawn), tuple(one.num_measured for one in drawn)
    series = (
        Series("predicted, 80 % interval", "predicted", labels, (1.0,) * len(drawn), "simulated", "points", low, high),
        Series("measured", "speed", labels, ratios, "measured", "points", n=counts),
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
