"""Seconds that one worker computes for a local batch, from a measured table; extrapolated only with a warning.

Between the batches of the table the time is interpolated linearly. Outside, the line through the two nearest points
goes on, but never below the share of images: a smaller batch cannot make a single image faster than the best
one measured. From a lone point the fixed part of a step (kernel launches, optimizer) is taken as 2 % of it.

`deviation` is the relative standard deviation of the answer: what the certainty of the table gives, and 4 % more
for every doubling outside of it. The largest error in predicting published systems was compute at small local
batches (docs/results/planning.md), not the network.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megabatch.errors import ConfigError
from megabatch.plan.edge import BATCH, STEP, Span, plain_text, shown
from megabatch.plan.quantity import CERTAINTIES, check_certainty, read_quantity

__all__ = ["BACKWARD_SHARE", "FIXED_SHARE", "ComputeTable", "check_points", "read_compute"]

FIXED_SHARE = 0.02
"""Part of a one-node step at a large batch that does not depend on the batch, where nothing else is known."""

BACKWARD_SHARE = Span(0.01, 0.99)
"""What part of a step the backward pass can be."""

_PER_DOUBLING = 0.04


@dataclass(frozen=True, slots=True)
class ComputeTable:
    """Step time of one worker without communication, by local batch, for one network.

    points: (images, seconds), batches rising. backward_share: part of the step that is the backward pass.
    noise: relative standard error of the points, where they were measured with their scatter.
    image_size: pixels a side of the images; 0 when it is not told.
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
        points = tuple((batch, seconds * factor) for batch, seconds in self.points)
        return dataclasses.replace(self, points=points)

    def seconds(self, local_batch: float) -> float:
        """Seconds of one step with `local_batch` images."""
        low, high = self._bracket(local_batch)
        (b0, t0), (b1, t1) = low, high
        line = t0 + (t1 - t0) * (local_batch - b0) / (b1 - b0)
        if self.batches[0] <= local_batch <= self.batches[1]:
            return line
        least_per_image = min(seconds / batch for batch, seconds in self.points)
        return max(line, (1 - FIXED_SHARE) * least_per_image * local_batch)

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
        return [f"ghost batch {local_batch:g} is outside the measured table ({known}): compute time is extrapolated"]

    def _bracket(self, local_batch: float) -> tuple[tuple[float, float], tuple[float, float]]:
        if len(self.points) == 1:
            batch, seconds = self.points[0]
            return (0.0, FIXED_SHARE * seconds), (batch, seconds)
        above = next((i for i, (batch, _) in enumerate(self.points) if batch >= local_batch), len(self.points) - 1)
        above = max(1, above)
        return self.points[above - 1], self.points[above]


def read_compute(table: Any, source: str) -> ComputeTable:
    """Read the [compute] table of a cluster file: `model`, `milliseconds_by_local_batch = { "32" = 50.0 }`.

    The `certainty` of the table holds for bare numbers; the least certain step time speaks for all.
    """
    if not isinstance(table, Mapping) or "milliseconds_by_local_batch" not in table:
        raise ConfigError(
            f"{source} has no measured step times; add [compute] with model and "
            'milliseconds_by_local_batch = { "32" = 50.0, "64" = 98.0 }'
        )
    rows = table["milliseconds_by_local_batch"]
    if not isinstance(rows, Mapping) or not rows:
        raise ConfigError(
            f"compute.milliseconds_by_local_batch of {source} is {shown(rows)}; "
            'give at least one batch and its step, such as { "32" = 50.0 }'
        )
    known = {"model", "milliseconds_by_local_batch", "certainty", "source", "backward_share"}
    if unknown := set(table) - known:
        raise ConfigError(
            f"[compute] of {source} has unknown keys {', '.join(map(shown, sorted(unknown)))}; "
            f"known: {', '.join(sorted(known))}"
        )
    usual = check_certainty(table.get("certainty", "given"), f"[compute] of {source}")
    points, certainties = [], []
    for batch_text, entry in rows.items():
        if not re.fullmatch("[0-9]{1,10}", batch_text, re.ASCII) or BATCH.why_not(int(batch_text)):
            raise ConfigError(
                f"local batch {shown(batch_text)} in [compute] of {source} is not a whole number above 0, at most "
                f"{BATCH.most:g}; write images in quotes"
            )
        step = read_quantity(entry, f"step time of local batch {batch_text} in {source}", STEP, 1e-3, usual)
        points.append((float(batch_text), step.value))
        certainties.append(step.certainty)
    check_points(points, source)
    share = table.get("backward_share", 2 / 3)
    if needed := BACKWARD_SHARE.why_not(share):
        raise ConfigError(f"compute.backward_share of {source} is {shown(share)}; {needed}")
    return ComputeTable(
        model=plain_text(table.get("model", "resnet50"), f"compute.model of {source}"),
        points=tuple(sorted(points)),
        certainty=max(certainties, key=lambda name: CERTAINTIES[name]),
        source=plain_text(table.get("source", ""), f"compute.source of {source}"),
        backward_share=float(share),
    )


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
