"""Reads `metrics.jsonl` of any length in bounded memory: curves of a few hundred points that keep every extreme.

The file is read twice: once to count lines, once to sort them into at most `NUM_BUCKETS` buckets of consecutive rows.
Of each column a bucket keeps its first, lowest, highest and last value, so a spike of one step in a million is
still on the page, and a file short enough keeps every row. Medians are over a thinned sample whose size is stated.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megabatch.files import open_regular
from megabatch.report.untrusted import bounded_lines, number, text

COLUMNS = (
    *("loss", "top1", "gradient_norm", "val_loss", "val_top1", "val_top5"),
    *("lr", "momentum", "weight_decay", "global_batch_size", "noise_scale", "images_per_second"),
    *("step_seconds", "data_seconds", "compute_seconds", "communication_seconds"),
    *("forward_seconds", "backward_seconds", "optimizer_seconds"),
)

NUM_BUCKETS = 400
MAX_LINE_BYTES = 2**20
MAX_SAMPLE = 100_000
MAX_MARKS = 100
# The first steps pay for memory, caches and connections: medians leave them out, and captions say so.
LEFT_OUT_STEPS = 5


class Point(NamedTuple):
    """One value of a column, and where it stands. seconds: since the first step, where the row says it."""

    row: int
    epoch: float
    value: float
    step: float = 0.0
    seconds: float | None = None


_Held = tuple[int, float, float, float, float | None]  # a Point not made yet: most rows never become one


class Quantiles(NamedTuple):
    """Median, 5 % and 95 % of `n` values."""

    middle: float
    low: float
    high: float
    n: int


@dataclass(slots=True)
class Column:
    """One column: points to draw, the mean of every bucket, and a sample for medians."""

    points: list[Point] = field(default_factory=list)
    means: list[Point] = field(default_factory=list)
    sample: array[float] = field(default_factory=lambda: array("d"))
    num_values: int = 0
    _stride: int = 1
    _bucket: int = -1
    _first: _Held | None = None
    _low: _Held | None = None
    _high: _Held | None = None
    _last: _Held | None = None
    _sum: float = 0.0
    _count: int = 0

    def add(
        self, row: int, epoch: float, value: float, bucket: int, step: float = 0.0, seconds: float | None = None
    ) -> None:
        here = (row, epoch, value, step, seconds)
        if bucket != self._bucket or self._low is None or self._high is None:
            self.flush()
            self._bucket = bucket
            self._first = self._low = self._high = here
        elif value < self._low[2]:
            self._low = here
        elif value > self._high[2]:
            self._high = here
        self._last = here
        self._sum += value
        self._count += 1
        if row >= LEFT_OUT_STEPS and self.num_values % self._stride == 0:
            self.sample.append(value)
            if len(self.sample) > MAX_SAMPLE:
                self.sample = self.sample[::2]
                self._stride *= 2
        self.num_values += 1

    def flush(self) -> None:
        kept = {held for held in (self._first, self._low, self._high, self._last) if held is not None}
        self.points += map(Point._make, sorted(kept))
        if self._last is not None and self._count:
            row, epoch, _, step, seconds = self._last
            self.means.append(Point(row, epoch, self._sum / self._count, step, seconds))
        self._first = self._low = self._high = self._last = None
        self._sum, self._count = 0.0, 0

    def quantiles(self) -> Quantiles | None:
        """Median, 5 % and 95 % of the sample: the smallest value that at least so many do not exceed."""
        if not self.sample:
            return None
        ordered = sorted(self.sample)
        middle, low, high = (ordered[max(0, math.ceil(part * len(ordered)) - 1)] for part in (0.5, 0.05, 0.95))
        return Quantiles(middle, low, high, len(ordered))


@dataclass(frozen=True, slots=True)
class Metrics:
    """All that a page needs of `metrics.jsonl`."""

    columns: dict[str, Column]
    num_rows: int = 0
    num_damaged: int = 0
    is_thinned: bool = False
    stages: tuple[tuple[float, str], ...] = ()  # (epoch, name) whenever `phase` changed

    def points(self, name: str) -> list[Point]:
        return self.columns[name].points if name in self.columns else []

    def smoothed(self, name: str) -> list[Point]:
        """The mean over a window around every bucket, as wide as 1/25 of the run; [] when there are too few rows.

        A window does not reach across a place where the epoch goes back: there a branch of the run begins or ends.
        """
        means = self.columns[name].means if name in self.columns else []
        half = len(means) // 50
        if not half:
            return []
        found = []
        for first, end in _stretches(means):
            for at in range(first, end):
                window = means[max(first, at - half) : min(end, at + half + 1)]
                found.append(means[at]._replace(value=sum(point.value for point in window) / len(window)))
        return found

    def quantiles(self, name: str) -> Quantiles | None:
        """Of a column without the first steps; None when there is nothing."""
        return self.columns[name].quantiles() if name in self.columns else None


def _stretches(points: list[Point]) -> list[tuple[int, int]]:
    """(first, end) of every stretch in which the epoch does not go back."""
    breaks = [at for at in range(1, len(points)) if points[at].epoch < points[at - 1].epoch]
    return list(pairwise([0, *breaks, len(points)]))


def read_metrics_file(path: Path) -> tuple[Metrics, str]:
    """The metrics, and a word about what was wrong with the file, empty when nothing was."""
    try:
        with open_regular(path) as file:
            num_lines = 0
            while chunk := file.read(2**20):
                num_lines += chunk.count(b"\n")
            file.seek(0)
            metrics = _collect(bounded_lines(file, MAX_LINE_BYTES), num_lines)
    except FileNotFoundError:
        return Metrics({}), "metrics.jsonl is not there"
    except OSError as error:
        return Metrics({}), f"metrics.jsonl {error.strerror or error}"
    problem = f"{metrics.num_damaged} lines of metrics.jsonl were damaged or too long" if metrics.num_damaged else ""
    return metrics, problem


def iterate_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole row in order, damaged ones passed over; values are still untrusted. Raises as `open_regular` does."""
    with open_regular(path) as file:
        yield from filter(None, _parsed(bounded_lines(file, MAX_LINE_BYTES)))


def _collect(lines: Iterator[bytes | None], num_lines: int) -> Metrics:
    columns: dict[str, Column] = {}
    num_rows = num_damaged = 0
    stages: list[tuple[float, str]] = []
    last_phase: Any = None
    # A bucket keeps four points: up to four times as many rows as buckets can all be kept at the same price.
    is_thinned = num_lines > 4 * NUM_BUCKETS
    rows_per_bucket = -(-num_lines // NUM_BUCKETS) if is_thinned else 1
    for row in _parsed(lines):
        if row is None:
            num_damaged += 1
            continue
        epoch = number(row.get("epoch"))
        place = float(row["step"]) if epoch is None else epoch
        step, seconds = float(row["step"]), number(row.get("wall_seconds"))
        bucket = num_rows // rows_per_bucket
        for name in COLUMNS:
            value = row.get(name)
            if type(value) is not float or value - value != 0.0:  # the common case first: a finite float
                value = number(value)
            if value is not None:
                if name not in columns:
                    columns[name] = Column()
                columns[name].add(num_rows, place, value, bucket, step, seconds)
        if row.get("phase") != last_phase and len(stages) < MAX_MARKS:
            last_phase = row.get("phase")
            if stage := text(last_phase, 40):
                stages.append((place, stage))
        num_rows += 1
    for column in columns.values():
        column.flush()
    return Metrics(columns, num_rows, num_damaged, is_thinned, tuple(stages))


def _parsed(lines: Iterator[bytes | None]) -> Iterator[dict[str, Any] | None]:
    """The rows, None for each that is damaged, too long or without a step."""
    for line in lines:
        try:
            row = json.loads(line) if line is not None else None
        except (ValueError, RecursionError):
            row = None
        yield row if isinstance(row, dict) and number(row.get("step")) is not None else None
