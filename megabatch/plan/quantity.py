"""Numbers that say where they come from: a value, how sure it is, and its source.

A cluster file writes `latency_microseconds = { value = 1.5, certainty = "assumed", source = "..." }`, or the bare
number when its author vouches for it. The certainty becomes a relative standard deviation, which the interval of
every prediction contains.

    measured    3 %   on this very system          assumed   35 %   plausible for such hardware
    given      10 %   a bare number                unknown   60 %   a stand-in so that there is an answer at all
    quoted     10 %   from a paper or data sheet   derived   15 %   by arithmetic from quoted values
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megabatch.errors import ConfigError, nearest
from megabatch.plan.edge import Span, plain_text, shown

__all__ = ["CERTAINTIES", "Quantity", "check_certainty", "read_quantity"]

CERTAINTIES = {"measured": 0.03, "given": 0.10, "quoted": 0.10, "derived": 0.15, "assumed": 0.35, "unknown": 0.60}


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


def read_quantity(entry: Any, where: str, span: Span, unit: float = 1.0, certainty: str = "given") -> Quantity:
    """Read a bare number, which has `certainty`, or a `{ value, certainty, source }` table; times `unit`.

    Raises:
        ConfigError: not a number, or one outside the span.
    """
    table: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"value": entry}
    unknown = set(table) - {"value", "certainty", "source"}
    if unknown:
        raise ConfigError(
            f"{where} has unknown keys {', '.join(map(shown, sorted(unknown)))}; give value, certainty, source"
        )
    if "value" not in table:
        raise ConfigError(f"{where} has no value; give value, certainty, source")
    if needed := span.why_not(table["value"], unit):
        raise ConfigError(f"{where} is {shown(table['value'])}; {needed}")
    named = check_certainty(table.get("certainty", certainty), where)
    return Quantity(float(table["value"]) * unit, named, plain_text(table.get("source", ""), f"the source of {where}"))


def check_certainty(name: object, where: str) -> str:
    """A key of `CERTAINTIES`; any other raises `ConfigError`."""
    if not isinstance(name, str) or name not in CERTAINTIES:
        choice = f"choose one of {', '.join(CERTAINTIES)}{nearest(str(name), CERTAINTIES)}"
        raise ConfigError(f"{where} has certainty {shown(name)}; {choice}")
    return name
