"""Where this worker's time goes: seconds per part of a step, and their sums over the run for every rank.

Parts are data (waiting for images), forward, backward (without what follows), communication (gradients that nothing
hides any more) and optimizer. They are read from the host's clock, so on CUDA, where the host runs ahead of the
device, forward, backward and optimizer are not known and stay NaN.
"""

from __future__ import annotations

import math
import time
from typing import Any

__all__ = ["PARTS", "Stopwatch", "ranks_table"]

PARTS = ("data", "forward", "backward", "communication", "optimizer")

# The first steps pay for memory, caches and connections, and would make every rank look like a straggler.
WARM_UP_STEPS = 3


class Stopwatch:
    """Laps of one step at a time; `sums` grow over the steps that count."""

    def __init__(self, host_clock_tells: bool) -> None:
        self._host_clock_tells = host_clock_tells
        self._last_seconds = 0.0
        self._num_seen = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.sums = dict.fromkeys(PARTS, 0.0)
        self.num_steps = 0

    def begin(self) -> None:
        """A step begins."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last_seconds = time.perf_counter()

    def skip(self) -> None:
        """What passed since the last lap belongs to no part."""
        self._last_seconds = time.perf_counter()

    def lap(self, part: str) -> None:
        """What passed since the last lap belongs to `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last_seconds
        self._last_seconds = now

    def expose(self, seconds: float) -> None:
        """The last `seconds` of backward were communication."""
        self.seconds["communication"] += seconds
        self.seconds["backward"] = max(0.0, self.seconds["backward"] - seconds)

    def end(self) -> None:
        """The step is over."""
        if not self._host_clock_tells:
            for part in ("forward", "backward", "optimizer"):
                self.seconds[part] = math.nan
        self._num_seen += 1
        if self._num_seen > WARM_UP_STEPS:
            self.num_steps += 1
            for part in PARTS:
                self.sums[part] += self.seconds[part]

    def means(self) -> list[float]:
        """Mean seconds of each part over the steps that count; NaN before there are any."""
        return [self.sums[part] / self.num_steps if self.num_steps else math.nan for part in PARTS]


def ranks_table(means: list[list[float]], hosts: list[str], num_steps: int) -> dict[str, Any]:
    """The content of `ranks.json`: mean seconds of every part on every rank; unknown ones are null."""
    return {
        "num_steps": num_steps,
        "left_out_steps": WARM_UP_STEPS,
        "ranks": [
            {"rank": rank, "host": host}
            | {
                f"{part}_seconds": value if math.isfinite(value) else None
                for part, value in zip(PARTS, row, strict=True)
            }
            for rank, (host, row) in enumerate(zip(hosts, means, strict=True))
        ],
    }
