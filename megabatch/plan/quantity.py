"""Numbers and how sure they are: bounds they must lie in, where they come from, intervals of what follows from them.

A cluster file writes `latency_microseconds = { value = 1.5, certainty = "assumed", source = "..." }`, or the bare
number when its author vouches for it. The certainty becomes a relative standard deviation, which the interval of
every prediction contains.

    measured    3 %   on this very system          assumed   35 %   plausible for such hardware
    given      10 %   a bare number                unknown   60 %   a stand-in so that there is an answer at all
    quoted     10 %   from a paper or data sheet   derived   15 %   by arithmetic from quoted values

A prediction is log-normal: its relative deviations add in squares and the interval, which holds four predictions out
of five, is x / f to x * f with f = exp(1.2816 d). Besides what is uncertain in the parameters, the form of the model
is wrong by some amount that grows with the distance from what was measured (`Reach`). Its steps are judgements, some of
them changed after the first rows were predicted; which ones, and how they fare, is written in docs/results/planning.md.

A slip in a unit or an exponent otherwise comes out far from where it entered: as an infinity, as a division by zero,
or as an answer that nobody doubts. So every number has bounds. They are wide: every machine there is lies inside.
"""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megabatch.errors import ConfigError, DataError, nearest

CERTAINTIES = {"measured": 0.03, "given": 0.10, "quoted": 0.10, "derived": 0.15, "assumed": 0.35, "unknown": 0.60}
MAX_DEVIATION = 1.0
"""What is uncertain by more than this, a factor of 3.6 each way, is no answer."""
FORM = 0.03
"""The model against a system it was calibrated on."""
EVIDENCE = {"same system": 0.0, "same stack": 0.05, "other stack": 0.12, "other system": 0.15, "other framework": 0.20}
"""How far one system may be from the mean of its like: itself; another chassis of the same organisation with the same
software; another round (a round of MLPerf brings 10 to 20 %); another organisation's; another framework. It counts for
the system that is predicted and, in the fit, for each stack that calibrates it: from a single one they are a root of
two further apart, from many hardly more."""

_Z80 = 1.2815515655446004
_LONGEST_SHOWN = 60
_CENTURY_SECONDS = 3.2e9
_PER_DOUBLING_WORKERS = 0.02
_PER_DOUBLING_BATCH = 0.05
_ONE_NODE_ONLY = 0.03
_MIXED = 0.08
_WARN_BEYOND = 16
_EVIDENCE_WORDS = {
    "same stack": "calibrated on another machine with the same software",
    "other stack": "calibrated on another software stack of the same family",
    "other framework": "calibrated on another framework on the same family",
    "other system": "calibrated on other organisations' systems with this accelerator",
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers from `least` to `most`, and 0 where `or_zero`; `hint` ends the line that refuses another."""

    least: float
    most: float
    or_zero: bool = False
    whole: bool = False
    hint: str = ""

    def why_not(self, value: object, unit: float = 1.0) -> str:
        """What to give instead, empty when `value` can be; it is counted in a unit of so many of the bounds'."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Whole numbers of a file may be too large for a float, so they are compared before anything is multiplied.
            inside = (value == 0 and self.or_zero) or self.least / unit <= value <= self.most / unit
            if inside and (not self.whole or value == math.floor(value)):
                return ""
        kind = "a whole number" if self.whole else "a number"
        zero = "0 or " if self.or_zero else ""
        return f"give {zero}{kind} from {self.least / unit:g} to {self.most / unit:g}{self.hint}"

    def check(self, value: Any) -> Any:
        """The value itself, or `ValueError`."""
        if needed := self.why_not(value):
            raise ValueError(f"is {shown(value)}; {needed}")
        return value


RATE = Bounds(1.0, 1e16)
"""Bytes per second of a link."""
LATENCY = Bounds(1e-12, 3600.0, or_zero=True)
DURATION = Bounds(1e-9, _CENTURY_SECONDS, or_zero=True)
CHECKPOINT = Bounds(1e-3, _CENTURY_SECONDS, hint="; leave it out to count 20 s")
MTBF = Bounds(1.0, 1e4 * _CENTURY_SECONDS)
"""Seconds between failures of a node: data sheets claim more than a century."""
STEP = Bounds(1e-9, 1e6)
"""Seconds of one step."""
COUNT = Bounds(1, 1e9, whole=True)
BATCH = Bounds(1, 1e9)
"""Images of one worker; a mean need not be whole."""
GLOBAL_BATCH_SIZE = Bounds(1, 1e12)
EPOCHS = Bounds(1e-6, 1e6)
SHARE = Bounds(1e-3, 1.0)
SCATTER = Bounds(1e-9, 10.0)
"""Relative deviation of workers' times."""
RATIO = Bounds(1e-3, 1e4)
"""A measured time over the median."""
OVERSUBSCRIPTION = Bounds(1.0, 1e4)
PRICE = Bounds(1e-6, 1e9, hint="; leave [price] out where hours are free")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its certainty (a key of `CERTAINTIES`) and its source.

    extra: further relative deviation, which a product has from its other factors.
    """

    value: float
    certainty: str = "given"
    source: str = ""
    extra: float = 0.0

    @property
    def relative_deviation(self) -> float:
        """One standard deviation as a part of the value."""
        return math.hypot(CERTAINTIES[self.certainty], self.extra)

    def times(self, factor: float) -> Quantity:
        """The same quantity in another unit, or changed on purpose."""
        return dataclasses.replace(self, value=self.value * factor)

    def by(self, other: Quantity) -> Quantity:
        """The product with an independent quantity: relative deviations add in squares."""
        extra = math.hypot(self.extra, other.relative_deviation)
        return dataclasses.replace(self, value=self.value * other.value, extra=extra)

    def over(self, other: Quantity) -> Quantity:
        """The quotient, likewise."""
        return self.by(dataclasses.replace(other, value=1 / other.value))


def read_quantity(entry: Any, where: str, bounds: Bounds, unit: float = 1.0, certainty: str = "given") -> Quantity:
    """Read a bare number, which has `certainty`, or a `{ value, certainty, source }` table; times `unit`."""
    table: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"value": entry}
    if unknown := ", ".join(shown(key) for key in sorted(set(table) - {"value", "certainty", "source"})):
        raise ConfigError(f"{where} has unknown keys {unknown}; give value, certainty, source")
    if "value" not in table:
        raise ConfigError(f"{where} has no value; give value, certainty, source")
    if needed := bounds.why_not(table["value"], unit):
        raise ConfigError(f"{where} is {shown(table['value'])}; {needed}")
    named = check_certainty(table.get("certainty", certainty), where)
    try:
        return Quantity(float(table["value"]) * unit, named, check_text(table.get("source", "")))
    except ValueError as error:
        raise ConfigError(f"the source of {where} {error}") from None


def check_certainty(name: object, where: str) -> str:
    """The name itself where it is a key of `CERTAINTIES`, else `ConfigError`."""
    if not isinstance(name, str) or name not in CERTAINTIES:
        choice = f"choose one of {', '.join(CERTAINTIES)}{nearest(str(name), CERTAINTIES)}"
        raise ConfigError(f"{where} has certainty {shown(name)}; {choice}")
    return name


def shown(value: object) -> str:
    """A value for an error's one line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def is_plain(text: str) -> bool:
    """Whether a text is one line without control characters."""
    return not any(unicodedata.category(sign)[0] == "C" or sign in "\u2028\u2029" for sign in text)


def check_text(value: object) -> str:
    """A text that will be printed, or `ValueError`."""
    if not isinstance(value, str) or not is_plain(value):
        raise ValueError(f"is {shown(value)}; give text on one line, in quotes, without control characters")
    return value


def cell_number(text: str, where: str, bounds: Bounds, unit: float = 1.0) -> float:
    """The number in a cell of a table; `DataError` when it is none, or outside the bounds."""
    try:
        value = float(text)
    except ValueError:
        raise DataError(f"{where} is {shown(text)}; give a number") from None
    if needed := bounds.why_not(value, unit):
        raise DataError(f"{where} is {text}; {needed}")
    return value


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


def interval(middle: float, deviation: float) -> Interval:
    """The 80 % interval of a prediction with this relative standard deviation."""
    factor = math.exp(_Z80 * deviation)
    return Interval(middle, middle / factor, middle * factor)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a prediction is from what was calibrated.

    workers, batch: doublings outside the calibrated range; `workers` below 0: fewer than were measured, where that
    matters. evidence: a key of `EVIDENCE`. lack_of_fit: how far the calibrated rows lie off the model themselves.
    mixed_measurement: the rows contain other work than training steps. known_workers: which were calibrated, in words.
    """

    workers: float = 0.0
    batch: float = 0.0
    evidence: str = "same system"
    first_time_across_nodes: bool = False
    mixed_measurement: bool = False
    lack_of_fit: float = FORM
    known_workers: str = "that were calibrated"

    @property
    def deviation(self) -> float:
        """Relative deviation of the model's form at this distance."""
        return math.hypot(
            self.lack_of_fit,
            _PER_DOUBLING_WORKERS * self.workers,
            _PER_DOUBLING_BATCH * self.batch,
            EVIDENCE[self.evidence],
            _ONE_NODE_ONLY if self.first_time_across_nodes else 0.0,
            _MIXED if self.mixed_measurement else 0.0,
        )

    @property
    def warnings(self) -> list[str]:
        """The reasons for a wider interval, for people."""
        times, apart = 2**self.workers, f"{self.lack_of_fit:.0%}"
        far = f"; over {_WARN_BEYOND} times is far outside" if times > _WARN_BEYOND else ""
        more = f"{times:,.{0 if times > 9.5 else 1}f} times the workers {self.known_workers}{far}"
        reasons = (
            (self.workers < -0.01, f"{1 / times:,.1f} times fewer workers than those {self.known_workers}"),
            (self.workers > 0.01, more),
            (self.batch > 0.01, f"local batch of a pass {2**self.batch:.3g} times outside the calibrated ones"),
            (self.evidence in _EVIDENCE_WORDS, _EVIDENCE_WORDS.get(self.evidence, "")),
            (self.first_time_across_nodes, "calibrated inside one node only"),
            (self.lack_of_fit > 2 * FORM, f"the calibration rows disagree with one another by {apart}"),
            (self.mixed_measurement, "the calibration rows contain evaluation passes"),
        )
        return [text for holds, text in reasons if holds]
