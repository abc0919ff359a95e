"""Numbers that say where they come from: a value, how sure it is, and its source.

A cluster file writes `latency_microseconds = { value = 1.5, certainty = "assumed", source = "..." }`, or the bare
number when its author vouches for it. The certainty becomes a relative standard deviation, which the interval of
every prediction contains.

    measured    3 %   on this very system          assumed   35 %   plausible for such hardware
    given      10 %   a bare number                unknown   60 %   a stand-in so that there is an answer at all
    quoted     10 %   from a paper or data sheet   derived   15 %   by arithmetic from quoted values
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megabatch.errors import ConfigError, nearest

__all__ = ["CERTAINTIES", "Quantity", "read_quantity"]

CERTAINTIES = {"measured": 0.03, "given": 0.10, "quoted": 0.10, "derived": 0.15, "assumed": 0.35, "unknown": 0.60}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its certainty (a key of `CERTAINTIES`) and its source."""

    value: float
    certainty: str = "given"
    source: str = ""

    @property
    def relative_deviation(self) -> float:
        """One standard deviation as a part of the value."""
        return CERTAINTIES[self.certainty]

    def times(self, factor: float) -> Quantity:
        """The same quantity in another unit, or changed on purpose."""
        return Quantity(self.value * factor, self.certainty, self.source)


def read_quantity(entry: Any, where: str, *, zero_allowed: bool = False) -> Quantity:
    """Read a bare number or a `{ value, certainty, source }` table.

    Raises:
        ConfigError: not a number, not finite, negative, or zero where a rate or a count is needed.
    """
    table: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"value": entry}
    unknown = set(table) - {"value", "certainty", "source"}
    if unknown:
        raise ConfigError(f"{where} has unknown keys {', '.join(sorted(unknown))}; give value, certainty, source")
    value, certainty = table.get("value"), str(table.get("certainty", "given"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where} is {value!r}; give a finite number")
    if value < 0 or (value == 0 and not zero_allowed):
        needed = "0 or more" if zero_allowed else "more than 0"
        raise ConfigError(f"{where} is {value:g}; it must be {needed}")
    if certainty not in CERTAINTIES:
        raise ConfigError(
            f"{where} has certainty '{certainty}'; "
            f"choose one of {', '.join(CERTAINTIES)}{nearest(certainty, CERTAINTIES)}"
        )
    return Quantity(float(value), certainty, str(table.get("source", "")))
