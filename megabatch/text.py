"""Numbers and tables as text, for people, Markdown and spreadsheets: a unit that fits, digits that mean something."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megabatch.errors import ConfigError

_READ_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SHOWN_UNITS = (("years", 365.25 * 86400.0), ("days", 86400.0), ("h", 3600.0), ("min", 60.0))


def seconds_text(seconds: float, like: float | None = None) -> str:
    """ "38 us", "12.4 ms", "89 s", "2.42 min", "3.08 h", "4 years"; in the unit of `like`, if given."""
    size = abs(seconds if like is None else like)
    small = ("s", 1.0) if size >= 1 else ("ms", 1e-3) if size >= 1e-3 else ("us", 1e-6)
    unit, factor = next((one for one in _SHOWN_UNITS if size >= 1.5 * one[1]), small)
    value = seconds / factor
    return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:,.0f} {unit}"


def read_seconds(text: str, what: str) -> float:
    """ "90s", "45min", "2h" or "1.5 d" in seconds; ConfigError, which names `what`, for anything else."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+)\s*", text.lower(), re.ASCII)
    seconds = float(match[1]) * _READ_UNITS.get(match[2], 0.0) if match else 0.0
    if not seconds:
        raise ConfigError(
            f"{what} '{text}' is no time; write a number above 0 and s, min, h or d, for example 90s, 10min or 2h"
        )
    return seconds


def bytes_text(count: float) -> str:
    """ "512 B", "1.0 KiB", "25.6 MiB": powers of two."""
    size, units = count, ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.3g} {units[0]}"


def count_text(value: float) -> str:
    """ "3,315", "0.25"."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def percent_text(part: float) -> str:
    """ "91.17 %"."""
    return f"{100 * part:.2f} %"


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV, the header first."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def csv_of_tables(tables: Sequence[dict[str, Any]]) -> str:
    """Tables with the same keys, at least one, as CSV with these as header."""
    return csv_text([list(tables[0]), *(table.values() for table in tables)])


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """A Markdown table; the columns of `head` that are among `numbers` stand on the right."""
    rule = ["---:" if name in numbers else "---" for name in head]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))
