"""Seconds that one worker computes for a local batch, from a measured table; extrapolated only with a warning.

Between the batches of the table the time is interpolated linearly. Outside, the line through the two nearest points
goes on, but never below the share of pictures: a smaller batch cannot make a single picture faster than the best
one measured. From a lone point the fixed part of a step (kernel launches, optimiser) is taken as 2 % of it.

`deviation` is the relative standard deviation of the answer: what the certainty of the table gives, and 4 % more
for every doubling outside of it. The largest error in predicting published systems was compute at small local
batches (docs/results/planning.md), not the network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megabatch.errors import ConfigError
from megabatch.plan.quantity import CERTAINTIES, read_quantity

__all__ = ["FIXED_SHARE", "ComputeTable", "read_compute"]

FIXED_SHARE = 0.02
"""Part of a one-node step at a large batch that does not depend on the batch, where nothing else is known."""

_PER_DOUBLING = 0.04


@dataclass(frozen=True, slots=True)
class ComputeTable:
    """Step time of one worker without communication, by local batch, for one network.

    points: (pictures, seconds), batches rising. backward_share: part of the step that is the backward pass.
    noise: relative standard error of the points, where they were measured with their scatter.
    """

    model: str
    points: tuple[tuple[float, float], ...]
    certainty: str = "given"
    source: str = ""
    backward_share: float = 2 / 3
    noise: float = 0.0

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
        points = tuple((batch, seconds * factor) for batch, seconds in self.points)
        return ComputeTable(self.model, points, self.certainty, self.source, self.backward_share, self.noise)

    def seconds(self, local_batch: float) -> float:
        """Seconds of one step with `local_batch` pictures."""
        low, high = self._bracket(local_batch)
        (b0, t0), (b1, t1) = low, high
        line = t0 + (t1 - t0) * (local_batch - b0) / (b1 - b0)
        if self.batches[0] <= local_batch <= self.batches[1]:
            return line
        least_per_picture = min(seconds / batch for batch, seconds in self.points)
        return max(line, (1 - FIXED_SHARE) * least_per_picture * local_batch)

    def doublings_outside(self, local_batch: float) -> float:
        """How far outside the table, in powers of two; 0 inside."""
        least, most = self.batches
        return max(0.0, math.log2(least / local_batch), math.log2(local_batch / most))

    def deviation(self, local_batch: float) -> float:
        """Relative standard deviation that extrapolation adds; 0 inside the table."""
        return _PER_DOUBLING * self.doublings_outside(local_batch)

    def warnings(self, local_batch: float) -> list[str]:
        """What to tell a person about this local batch."""
        if self.doublings_outside(local_batch) < 0.01:
            return []
        least, most = self.batches
        known = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        return [f"local batch {local_batch:g} is outside the measured table ({known}): compute time is extrapolated"]

    def _bracket(self, local_batch: float) -> tuple[tuple[float, float], tuple[float, float]]:
        if len(self.points) == 1:
            batch, seconds = self.points[0]
            return (0.0, FIXED_SHARE * seconds), (batch, seconds)
        above = next((i for i, (batch, _) in enumerate(self.points) if batch >= local_batch), len(self.points) - 1)
        above = max(1, above)
        return self.points[above - 1], self.points[above]


def read_compute(table: Any, source: str) -> ComputeTable:
    """Read the [compute] table of a cluster file: `model`, `milliseconds_by_local_batch = { "32" = 50.0 }`."""
    if not isinstance(table, Mapping) or "milliseconds_by_local_batch" not in table:
        raise ConfigError(
            f"{source} has no measured step times; add [compute] with model and "
            'milliseconds_by_local_batch = { "32" = 50.0, "64" = 98.0 }'
        )
    rows = table["milliseconds_by_local_batch"]
    if not isinstance(rows, Mapping) or not rows:
        raise ConfigError(f"compute.milliseconds_by_local_batch of {source} is empty; give at least one batch")
    known = {"model", "milliseconds_by_local_batch", "certainty", "source", "backward_share"}
    if unknown := set(table) - known:
        raise ConfigError(
            f"[compute] of {source} has unknown keys {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
        )
    points = []
    for batch_text, entry in rows.items():
        if not str(batch_text).isascii() or not str(batch_text).isdigit() or int(batch_text) < 1:
            raise ConfigError(f"local batch '{batch_text}' in [compute] of {source} is not a whole number above 0")
        milliseconds = read_quantity(entry, f"step time of local batch {batch_text} in {source}")
        points.append((float(batch_text), milliseconds.value / 1e3))
    points.sort()
    for (b0, t0), (b1, t1) in pairwise(points):
        if t1 < t0:
            raise ConfigError(
                f"step times of {source} contradict each other: {b1:g} pictures in {1e3 * t1:g} ms, "
                f"but {b0:g} in {1e3 * t0:g} ms; measure again"
            )
    certainty = str(table.get("certainty", "given"))
    if certainty not in CERTAINTIES:
        raise ConfigError(f"certainty '{certainty}' in [compute] of {source}; choose one of {', '.join(CERTAINTIES)}")
    share = read_quantity(table.get("backward_share", 2 / 3), f"compute.backward_share of {source}").value
    if share >= 1:
        raise ConfigError(f"compute.backward_share of {source} is {share:g}; give a part of the step below 1")
    return ComputeTable(
        str(table.get("model", "resnet50")), tuple(points), certainty, str(table.get("source", "")), share
    )
