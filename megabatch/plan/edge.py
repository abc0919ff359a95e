"""What may enter the planner: numbers inside a span that can be, and plain text on one line.

A slip in a unit or an exponent otherwise comes out far from where it entered: as an infinity, as a division by zero,
or as an answer that nobody doubts. The spans are wide: they hold every machine there is with room to spare.
"""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

from megabatch.errors import ConfigError

__all__ = [
    *("BATCH", "GLOBAL_BATCH_SIZE", "CENTURY_SECONDS", "CHECKPOINT", "COUNT", "DURATION", "EPOCHS", "LATENCY", "MTBF"),
    *("OVERSUBSCRIPTION", "PRICE", "RATE", "RATIO", "SCATTER", "SHARE", "STEP", "Span", "is_plain", "plain_text"),
    "shown",
]

CENTURY_SECONDS = 3.2e9
_LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers from `least` to `most`, and 0 where `or_zero`; `hint` ends the line that refuses another."""

    least: float
    most: float
    or_zero: bool = False
    whole: bool = False
    hint: str = ""

    def why_not(self, value: object, unit: float = 1.0) -> str:
        """What to give instead, empty when `value` can be; it is counted in a unit of so many of the span's."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self._holds(value, unit):
            kind = "a whole number" if self.whole else "a number"
            zero = "0 or " if self.or_zero else ""
            return f"give {zero}{kind} from {self.least / unit:g} to {self.most / unit:g}{self.hint}"
        return ""

    def _holds(self, value: float, unit: float) -> bool:
        # Whole numbers of a file may be too large for a float, so they are compared before anything is multiplied.
        if not (value == 0 and self.or_zero) and not self.least / unit <= value <= self.most / unit:
            return False
        return not self.whole or value == math.floor(value)


RATE = Span(1.0, 1e16)
"""Bytes per second of a link."""
LATENCY = Span(1e-12, 3600.0, or_zero=True)
DURATION = Span(1e-9, CENTURY_SECONDS, or_zero=True)
CHECKPOINT = Span(1e-3, CENTURY_SECONDS, hint="; leave it out to count 20 s")
MTBF = Span(1.0, 1e4 * CENTURY_SECONDS)
"""Seconds between failures of a node: data sheets reference more than a century."""
STEP = Span(1e-9, 1e6)
"""Seconds of one step."""
COUNT = Span(1, 1e9, whole=True)
BATCH = Span(1, 1e9)
"""Images of one worker; a mean need not be whole."""
GLOBAL_BATCH_SIZE = Span(1, 1e12)
EPOCHS = Span(1e-6, 1e6)
SHARE = Span(1e-3, 1.0)
SCATTER = Span(1e-9, 10.0)
"""Relative deviation of workers' times."""
RATIO = Span(1e-3, 1e4)
"""A measured time over the median."""
OVERSUBSCRIPTION = Span(1.0, 1e4)
PRICE = Span(1e-6, 1e9, hint="; leave [price] out where hours are free")


def shown(value: object) -> str:
    """A value for an error's one line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def is_plain(text: str) -> bool:
    """Whether a text is one line without control characters."""
    return not any(unicodedata.category(sign)[0] == "C" or sign in "\u2028\u2029" for sign in text)


def plain_text(value: object, where: str) -> str:
    """A text of a settings file that will be printed.

    Raises:
        ConfigError: not a text, or one with line breaks or control characters.
    """
    if not isinstance(value, str) or not is_plain(value):
        raise ConfigError(f"{where} is {shown(value)}; give text on one line, in quotes, without control characters")
    return value
