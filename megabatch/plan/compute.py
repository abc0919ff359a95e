"""How long workers compute: one of them for a local batch, from a measured table, and the slowest of N of them.

Between the batches of the table the time is interpolated linearly. Outside, the line through the two nearest points
goes on, but no image becomes faster than the best one measured. From a lone point the fixed part of a step (kernel
launches, optimizer) is taken as 2 % of it. A batch outside the table widens the interval by 4 % for every doubling,
and says so: the largest error in predicting published systems was compute at small local batches.

Tables come from cluster files, from runs, and from the JSON file that `megabatch bench step` writes:

    {"megabatch_step_times": 1, "model": "resnet8", "device": "cpu", "threads": 1, "backward_share": 0.64,
     "layers": [{"name": "conv1", "parameters": 176, "work": 0.01}, ...],
     "rows": [{"local_batch": 64, "seconds": 0.11, "deviation": 0.02, "iterations": 20}, ...], "versions": {...}}

`work` is a layer's part of the backward pass, by multiply-adds; `deviation` is the relative scatter of the steps,
by the distance between the 10th and the 90th percentile, so that a single hiccup does not decide it.

Every step waits for the slowest worker. Workers whose times scatter around a mean with deviation s finish together at
mean + s * m(N), where m(N) is the expected largest of N standard normal draws: the integral itself up to N = 4096,
above that the refined form of extreme-value theory (the textbook sqrt(2 ln N) overstates it):

    m(N) = r - (ln ln N + ln 4 pi) / (2 r) + 0.5772 / r,      r = sqrt(2 ln N)

Measured times, where there are any, replace the normal law: with a heavy tail (Student-t(3) noise of the same
deviation) m is 8 instead of 3.2 at N = 1024.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megabatch.errors import ConfigError, DataError, complaint
from megabatch.plan.quantity import BATCH, CERTAINTIES, COUNT, SCATTER, STEP, Bounds, check_text
from megabatch.plan.workload import Layer

BACKWARD_SHARE = Bounds(0.01, 0.99)
"""What part of a step the backward pass can be."""

_FIXED_SHARE = 0.02
"""Part of a one-node step at a large batch that does not depend on the batch, where nothing else is known."""
_PER_DOUBLING = 0.04
_FORMAT = 1
_EULER = 0.5772156649015329
_EXACT_UP_TO = 4096

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class ComputeTable:
    """Step time of one worker without communication, by local batch, for one network.

    points: (images, seconds), batches rising. backward_share: part of the step that is the backward pass.
    noise: relative standard error of the points, where they were measured with their scatter.
    image_size: pixels a side of the images; 0 when it is not known.
    """

    model: str
    points: tuple[tuple[float, float], ...]
    certainty: str = "given"
    source: str = ""
    backward_share: float = 2 / 3
    noise: float = 0.0
    image_size: int = 224

    @property
    def relative_deviation(self) -> float:
        """One standard deviation of a value inside the table."""
        return math.hypot(CERTAINTIES[self.certainty], self.noise)

    @property
    def batches(self) -> tuple[float, float]:
        """The smallest and the largest local batch of the table."""
        return self.points[0][0], self.points[-1][0]

    def times(self, factor: float) -> ComputeTable:
        """The same worker, slower by `factor`."""
        return dataclasses.replace(self, points=tuple((batch, seconds * factor) for batch, seconds in self.points))

    def seconds(self, local_batch: float) -> float:
        """Seconds of one step with `local_batch` images."""
        # The two points around the batch, or the nearest two; a lone one beside the fixed part of its step.
        points = self.points if len(self.points) > 1 else ((0.0, _FIXED_SHARE * self.points[0][1]), *self.points)
        above = next((i for i, (batch, _) in enumerate(points) if batch >= local_batch), len(points) - 1)
        (b0, t0), (b1, t1) = points[max(1, above) - 1], points[max(1, above)]
        line = t0 + (t1 - t0) * (local_batch - b0) / (b1 - b0)
        if self.batches[0] <= local_batch <= self.batches[1]:
            return line
        least_per_image = min(seconds / batch for batch, seconds in self.points)
        return max(line, (1 - _FIXED_SHARE) * least_per_image * local_batch)

    def deviation(self, local_batch: float) -> float:
        """Relative standard deviation that extrapolation adds; 0 inside the table."""
        return _PER_DOUBLING * self._doublings_outside(local_batch)

    def warnings(self, local_batch: float) -> list[str]:
        """What to tell a person about this local batch."""
        if self._doublings_outside(local_batch) < 0.01:
            return []
        least, most = self.batches
        known = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        return [f"ghost batch {local_batch:g} is outside the measured table ({known}): compute time is extrapolated"]

    def _doublings_outside(self, local_batch: float) -> float:
        least, most = self.batches
        return max(0.0, math.log2(least / local_batch), math.log2(local_batch / most))


def check_points(points: Sequence[tuple[float, float]], source: str, tolerance: float = 0.0) -> None:
    """Refuse step times that cannot be: a batch twice, or more images in less time by more than `tolerance` of it."""
    for (b0, t0), (b1, t1) in pairwise(sorted(points)):
        if b1 == b0:
            raise ConfigError(f"step times of {source} hold local batch {b0:g} twice; keep one of the two")
        if t1 < t0 * (1 - tolerance):
            raise ConfigError(
                f"step times of {source} contradict each other: {b1:g} images in {1e3 * t1:g} ms, "
                f"but {b0:g} in {1e3 * t0:g} ms; measure again"
            )


def _within(bounds: Bounds, **changed: Any) -> BeforeValidator:
    return BeforeValidator(dataclasses.replace(bounds, **changed).check)


Name = Annotated[str, BeforeValidator(check_text)]


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class StepRow:
    """The median step of one local batch."""

    local_batch: Annotated[int, _within(BATCH, whole=True)]
    seconds: Annotated[float, _within(STEP)]
    deviation: Annotated[float, _within(SCATTER, least=0.0)]
    iterations: Annotated[int, _within(COUNT)]


@checked_dataclass(frozen=True)
class StepTimes:
    """What one worker of this machine takes for one network.

    image_size, workers: pixels a side, and how many computed at the same time; 0 in files that do not tell.
    """

    model: Name
    device: Name
    threads: Annotated[int, _within(COUNT)]
    backward_share: Annotated[float, _within(BACKWARD_SHARE)]
    layers: tuple[Layer, ...]
    rows: Annotated[
        tuple[StepRow, ...], AfterValidator(lambda rows: tuple(sorted(rows, key=lambda row: row.local_batch)))
    ]
    versions: dict[str, str] = field(default_factory=dict)
    image_size: Annotated[int, _within(COUNT, or_zero=True)] = 0
    workers: Annotated[int, _within(COUNT, or_zero=True)] = 0

    def __post_init__(self) -> None:
        if not self.rows or abs(sum(layer.work for layer in self.layers) - 1) > 0.01:
            raise ValueError("rows are missing, or the work of the layers is not 1 in all")
        if not all(0 <= layer.parameters <= 1e12 and 0 <= layer.work <= 1 for layer in self.layers):
            raise ValueError("a layer has impossible parameters or work")

    @property
    def table(self) -> ComputeTable:
        """As the planner wants it."""
        points = tuple((float(row.local_batch), row.seconds) for row in self.rows)
        # The standard error of a median of n is 1.25 deviations over the root of n.
        noise = max(1.25 * row.deviation / math.sqrt(row.iterations) for row in self.rows)
        source = "megabatch bench step"
        return ComputeTable(self.model, points, "measured", source, self.backward_share, noise, self.image_size)

    @property
    def deviation(self) -> float:
        """The largest relative scatter of the rows."""
        return max(row.deviation for row in self.rows)


def step_times_text(times: StepTimes) -> str:
    """The file's content; equal measurements give equal text."""
    versions = dict(sorted(times.versions.items()))
    return json.dumps({"megabatch_step_times": _FORMAT, **asdict(times), "versions": versions}, indent=1) + "\n"


def step_times_from_data(content: Mapping[str, Any], source: str) -> StepTimes:
    """Read the parsed content of such a file; `source` names it in errors.

    Times that fall with the batch by more than they are uncertain are refused.
    """
    if content.get("megabatch_step_times") != _FORMAT:
        raise ConfigError(f"{source} has another format than this version writes ({_FORMAT}); measure again")
    fields = {key: value for key, value in content.items() if key != "megabatch_step_times"}
    try:
        times = TypeAdapter(StepTimes).validate_python(fields)
    except ValidationError as error:
        reason = " ".join(complaint(error)).strip()
        raise ConfigError(f"{source} is damaged ({reason}); measure again with `megabatch bench step`") from None
    check_points(times.table.points, source, tolerance=2 * times.table.relative_deviation)
    return times


@lru_cache(maxsize=4096)
def expected_maximum(world_size: int) -> float:
    """Expected largest of `world_size` standard normal draws; 0 for one worker."""
    if world_size < 1:
        raise DataError(f"{world_size} workers; the slowest of at least 1 is asked for")
    if world_size == 1:
        return 0.0
    if world_size <= _EXACT_UP_TO:
        # The integral of x d(Phi(x)^N), by the trapezium rule: exact to 1e-6 for what is asked here.
        grid, phi, density = _normal_law()
        return float(np.trapezoid(grid * world_size * phi ** (world_size - 1) * density, grid))
    root = math.sqrt(2 * math.log(world_size))
    return root - (math.log(math.log(world_size)) + math.log(4 * math.pi)) / (2 * root) + _EULER / root


def empirical_maximum(times: Sequence[float], world_size: int) -> float:
    """Expected largest of `world_size` draws from measured times.

    The draws come from the measured ones, so the tail ends at the largest time seen: with fewer measurements than
    workers the result is a lower bound.
    """
    if len(times) < 2:
        raise DataError(f"{len(times)} measured times; at least 2 are needed to find the slowest worker")
    rising = np.sort(np.asarray(times, dtype=np.float64))
    if not np.all(np.isfinite(rising)) or rising[0] < 0:
        raise DataError("measured times must be finite and not negative; remove the rows that are not")
    at_most = (np.arange(len(rising) + 1) / len(rising)) ** world_size
    return float(np.sum(rising * np.diff(at_most)))


@lru_cache(maxsize=1)
def _normal_law() -> tuple[Array, Array, Array]:
    grid = np.linspace(-8.0, 8.0, 2001)
    phi = 0.5 * (1 + np.array([math.erf(x / math.sqrt(2)) for x in grid]))
    return grid, phi, np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
