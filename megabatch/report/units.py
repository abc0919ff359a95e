"""Numbers as people read them: a unit that fits, digits that mean something."""

from __future__ import annotations

__all__ = ["bytes_text", "count_text", "percent_text", "seconds_text"]


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
