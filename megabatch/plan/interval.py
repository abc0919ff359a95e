"""Intervals that hold four predictions out of five, and what makes them wider.

A prediction is log-normal: its relative deviations add in squares and the interval is x / f to x * f with f =
exp(1.2816 d). Besides what is uncertain in the parameters, the form of the model is wrong by some amount that grows
with the distance from what was measured. The steps below are judgements, some of them changed after the first rows
were predicted; which ones, and how they fare, is written in docs/results/planning.md (`megabatch plan --validate`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "EVIDENCE",
    "FORM",
    "MAX_DEVIATION",
    "Interval",
    "Reach",
    "combine",
    "interval",
    "reach_deviation",
    "reach_warnings",
]

_Z80 = 1.2815515655446004

MAX_DEVIATION = 1.0
"""What is uncertain by more than this, a factor of 3.6 each way, is no answer."""

FORM = 0.03
"""The model against a system it was calibrated on."""

EVIDENCE = {"same system": 0.0, "same stack": 0.05, "other stack": 0.12, "other system": 0.15, "other framework": 0.20}
"""How far one system may be from the mean of its like: itself; another chassis of the same organisation with the same
software; another round (a round of MLPerf brings 10 to 20 %); another organisation's; another framework. It counts for
the system that is predicted and, in the fit, for each stack that calibrates it: from a single one they are a root of
two further apart, from many hardly more."""

_PER_DOUBLING_WORKERS = 0.02
_PER_DOUBLING_BATCH = 0.05
_ONE_NODE_ONLY = 0.03
_MIXED = 0.08
_WARN_BEYOND = 16


@dataclass(frozen=True, slots=True)
class Interval:
    """The middle and the limits that hold 80 %."""

    middle: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def times(self, factor: float) -> Interval:
        """The same in another unit."""
        return Interval(self.middle * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a prediction is from what was calibrated.

    workers, batch: doublings outside the calibrated range; `workers` below 0: fewer than were measured, where that
    matters. known_workers: how many were calibrated, in words.
    evidence: a key of `EVIDENCE`.
    lack_of_fit: how far the calibrated rows lie off the model themselves.
    mixed_measurement: the rows are known to contain other work than training steps.
    """

    workers: float = 0.0
    batch: float = 0.0
    evidence: str = "same system"
    first_time_across_nodes: bool = False
    mixed_measurement: bool = False
    lack_of_fit: float = FORM
    known_workers: str = "that were calibrated"


def interval(middle: float, deviation: float) -> Interval:
    """The 80 % interval of a prediction with this relative standard deviation."""
    factor = math.exp(_Z80 * deviation)
    return Interval(middle, middle / factor, middle * factor)


def combine(*deviations: float) -> float:
    """Independent relative deviations together."""
    return math.hypot(*deviations)


def reach_deviation(reach: Reach) -> float:
    """Relative deviation of the model's form at this distance."""
    return combine(
        reach.lack_of_fit,
        _PER_DOUBLING_WORKERS * reach.workers,
        _PER_DOUBLING_BATCH * reach.batch,
        EVIDENCE[reach.evidence],
        _ONE_NODE_ONLY if reach.first_time_across_nodes else 0.0,
        _MIXED if reach.mixed_measurement else 0.0,
    )


def reach_warnings(reach: Reach) -> list[str]:
    """The reasons for a wider interval, for people."""
    found = []
    if reach.workers < -0.01:
        found.append(f"{2**-reach.workers:,.1f} times fewer workers than those {reach.known_workers}")
    if reach.workers > 0.01:
        far = f"; over {_WARN_BEYOND} times is far outside" if reach.workers > math.log2(_WARN_BEYOND) else ""
        times = 2**reach.workers
        found.append(f"{times:,.{0 if times > 9.5 else 1}f} times the workers {reach.known_workers}{far}")
    if reach.batch > 0.01:
        found.append(f"local batch of a pass {2**reach.batch:.3g} times outside the calibrated ones")
    if reach.evidence == "same stack":
        found.append("calibrated on another machine with the same software")
    if reach.evidence == "other stack":
        found.append("calibrated on another software stack of the same family")
    if reach.evidence == "other framework":
        found.append("calibrated on another framework on the same family")
    if reach.evidence == "other system":
        found.append("calibrated on other organisations' systems with this accelerator")
    if reach.first_time_across_nodes:
        found.append("calibrated inside one node only")
    if reach.lack_of_fit > 2 * FORM:
        found.append(f"the calibration rows disagree with one another by {reach.lack_of_fit:.0%}")
    if reach.mixed_measurement:
        found.append("the calibration rows contain evaluation passes")
    return found
