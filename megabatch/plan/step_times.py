"""Step times of one worker as `megabatch bench step` measures them: a JSON file that the planner reads. Imports no
torch.

    {"megabatch_step_times": 1, "model": "resnet8", "device": "cpu", "threads": 1, "backward_share": 0.64,
     "layers": [{"name": "conv1", "parameters": 176, "work": 0.01}, ...],
     "rows": [{"local_batch": 64, "seconds": 0.11, "deviation": 0.02, "iterations": 20}, ...], "versions": {...}}

`work` is a layer's part of the backward pass, by multiply-adds; `deviation` is the relative scatter of the steps,
by the distance between the 10th and the 90th percentile, so that a single hiccup does not decide it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megabatch.errors import ConfigError
from megabatch.files import write_atomically
from megabatch.plan.compute import BACKWARD_SHARE, ComputeTable, check_points
from megabatch.plan.edge import BATCH, COUNT, SCATTER, STEP, Span, is_plain, shown
from megabatch.plan.workload import Layer

__all__ = ["StepRow", "StepTimes", "read_step_times", "step_times_from_data", "step_times_text", "write_step_times"]

FORMAT = 1

_ROW_SPANS = {
    "local_batch": dataclasses.replace(BATCH, whole=True),
    "seconds": STEP,
    "deviation": Span(0.0, SCATTER.most),
    "iterations": COUNT,
}
_COUNT_OR_NOT_TOLD = dataclasses.replace(COUNT, or_zero=True)
_LAYER_SPANS = {"parameters": dataclasses.replace(COUNT, most=1e12, or_zero=True), "work": Span(0.0, 1.0)}


@dataclass(frozen=True, slots=True)
class StepRow:
    """The median step of one local batch."""

    local_batch: int
    seconds: float
    deviation: float
    iterations: int


@dataclass(frozen=True)
class StepTimes:
    """What one worker of this machine takes for one network.

    image_size, workers: pixels a side, and how many computed at the same time; 0 in files that do not tell.
    """

    model: str
    device: str
    threads: int
    backward_share: float
    layers: tuple[Layer, ...]
    rows: tuple[StepRow, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    image_size: int = 0
    workers: int = 0

    @property
    def table(self) -> ComputeTable:
        """As the planner wants it."""
        points = tuple((float(row.local_batch), row.seconds) for row in self.rows)
        # The standard error of a median of n is 1.25 deviations over the root of n.
        noise = max(1.25 * row.deviation / math.sqrt(row.iterations) for row in self.rows)
        return ComputeTable(
            self.model, points, "measured", "megabatch bench step", self.backward_share, noise, self.image_size
        )

    @property
    def deviation(self) -> float:
        """The largest relative scatter of the rows."""
        return max(row.deviation for row in self.rows)


def step_times_text(times: StepTimes) -> str:
    """The file's content; equal measurements give equal text."""
    content = {"megabatch_step_times": FORMAT, **asdict(times)}
    content["versions"] = dict(sorted(times.versions.items()))
    return json.dumps(content, indent=1) + "\n"


def write_step_times(path: str | Path, times: StepTimes) -> None:
    """Write the file beside its place and rename it there."""
    write_atomically(Path(path), step_times_text(times))


def step_times_from_data(content: Mapping[str, Any], source: str) -> StepTimes:
    """Read the parsed content of such a file; `source` names it in errors.

    Raises:
        ConfigError: another format, a damaged file, or times that fall with the batch by more than they are uncertain.
    """
    if content.get("megabatch_step_times") != FORMAT:
        raise ConfigError(f"{source} has another format than this version writes ({FORMAT}); measure again")
    try:
        times = StepTimes(
            model=content["model"],
            device=content["device"],
            threads=content["threads"],
            backward_share=content["backward_share"],
            layers=tuple(Layer(**layer) for layer in content["layers"]),
            rows=tuple(sorted((StepRow(**row) for row in content["rows"]), key=lambda row: row.local_batch)),
            versions=dict(content.get("versions", {})),
            image_size=content.get("image_size", 0),
            workers=content.get("workers", 0),
        )
        _check(times)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source} is damaged ({error}); measure again with `megabatch bench step`") from None
    check_points(times.table.points, source, tolerance=2 * times.table.relative_deviation)
    return times


def _check(times: StepTimes) -> None:
    """Raise `ValueError` for what no measurement gives."""
    values: list[tuple[str, object, Span]] = [
        ("threads", times.threads, COUNT),
        ("backward_share", times.backward_share, BACKWARD_SHARE),
        ("image_size", times.image_size, _COUNT_OR_NOT_TOLD),
        ("workers", times.workers, _COUNT_OR_NOT_TOLD),
    ]
    values += [(name, getattr(row, name), span) for row in times.rows for name, span in _ROW_SPANS.items()]
    values += [(name, getattr(layer, name), span) for layer in times.layers for name, span in _LAYER_SPANS.items()]
    for name, value, span in values:
        if needed := span.why_not(value):
            raise ValueError(f"{name} is {shown(value)}, not {needed.removeprefix('give ')}")
    for text in (times.model, times.device):
        if not isinstance(text, str) or not is_plain(text):
            raise ValueError(f"a name is {shown(text)}")
    if not times.rows or abs(sum(layer.work for layer in times.layers) - 1) > 0.01:
        raise ValueError("rows are missing, or the work of the layers is not 1 in all")


def read_step_times(path: str | Path) -> StepTimes:
    """Read a file that `megabatch bench step` wrote."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be read ({error}); give a file of `megabatch bench step`") from None
    if not isinstance(content, dict):
        raise ConfigError(f"'{path}' is no table of step times; give a file of `megabatch bench step`")
    return step_times_from_data(content, f"'{path}'")
