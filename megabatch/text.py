"""Numbers and tables as text, for people, Markdown and spreadsheets: a unit that fits, digits that mean something."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_text(seconds: float) -> str:
    """ "38 us", "12.4 ms", "8.30 s", "2 min 25 s", "3 h 04 min"."""
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{seconds / 86400:.3g} days"


def read_seconds(text: str) -> float | None:
    """ "90s", "45min", "2h", "1.5 d" or a bare number as seconds; None for anything else."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    return float(match[1]) * _SECONDS[match[2]] if match and match[2] in _SECONDS else None


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
