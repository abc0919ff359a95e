"""All-reduce time by message size and algorithm: points measured, lines modelled from the measured links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megabatch.report.figure import ALGORITHM_COLORS, Axis, Figure, Missing, Series
from megabatch.report.units import bytes_text
from megabatch.report.untrusted import items, number, table, text, whole

__all__ = ["NetworkTimes", "all_reduce"]

TITLE = "All-reduce time by message size"


@dataclass(frozen=True, slots=True)
class NetworkTimes:
    """What is known of the network: rows of `bench allreduce --json` or points of a calibration, and modelled points.

    `phase_seconds` are modelled seconds of each phase of each algorithm for a message of `message_bytes`.
    """

    measured: tuple[dict[str, Any], ...] = ()
    modelled: tuple[dict[str, Any], ...] = ()
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    message_bytes: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class _Cell:
    size: int
    seconds: float
    high_seconds: float | None
    count: int | None


def all_reduce(times: NetworkTimes) -> Figure | Missing:
    """Seconds of a whole all-reduce over its size, one colour per algorithm."""
    measured = _cells(times.measured)
    if not measured:
        why = "no measurement was given; make one with `megabatch bench allreduce --output FILE`, then --network FILE"
        return Missing("all_reduce", TITLE, why)
    series = []
    for algorithm, cells in measured.items():
        xs, ys = tuple(float(cell.size) for cell in cells), tuple(cell.seconds for cell in cells)
        known = [
            (c.seconds, c.high_seconds, c.count) for c in cells if c.high_seconds is not None and c.count is not None
        ]
        # p95 is only shown where every cell of the algorithm has one.
        low, high, count = (tuple(v) for v in zip(*known, strict=True)) if len(known) == len(cells) else ((), (), ())
        color = _color(algorithm)
        series.append(Series(f"{algorithm}", color, xs, ys, mark="points", low=low, high=high, n=count))
    for algorithm, cells in _cells(times.modelled).items():
        xs, ys = tuple(float(cell.size) for cell in cells), tuple(cell.seconds for cell in cells)
        series.append(Series(f"{algorithm}, modelled", _color(algorithm), xs, ys, tag="simulated", dashed=True))
    caption = "Points: median over rounds of the slowest rank"
    caption += ", bars up to p95, n on hover." if any(one.n for one in series) else "."
    if times.modelled:
        caption += " Lines: the phase list priced with the latency and rate measured on each axis."
    if times.source:
        caption += f" From {times.source}."
    x, y = Axis("message [bytes]", "log2"), Axis("time of one all-reduce [s]", "log")
    return Figure("all_reduce", _finding(measured), caption, x, y, tuple(series))


def _cells(rows: Sequence[Any]) -> dict[str, list[_Cell]]:
    found: dict[str, dict[int, _Cell]] = {}
    for row in items(list(rows)):
        values = table(row)
        name, size = text(values.get("algorithm"), 40), whole(values.get("message_bytes"), 1, 2**50)
        seconds = number(values.get("seconds")) or number(values.get("p50_seconds"))
        if name and size and seconds and seconds > 0:
            high, count = number(values.get("p95_seconds")), whole(values.get("iterations"), 1)
            found.setdefault(name, {})[size] = _Cell(size, seconds, high, count)
    known = [name for name in ALGORITHM_COLORS if name in found]
    order = known + sorted(found.keys() - set(known))
    return {name: [found[name][size] for size in sorted(found[name])] for name in order[:20]}


def _finding(measured: dict[str, list[_Cell]]) -> str:
    """The fastest algorithm at the largest size that at least two algorithms share."""
    sizes: dict[int, dict[str, float]] = {}
    for algorithm, cells in measured.items():
        for cell in cells:
            sizes.setdefault(cell.size, {})[algorithm] = cell.seconds
    shared = [size for size, by_name in sizes.items() if len(by_name) > 1]
    if not shared:
        return TITLE
    by_name = sizes[max(shared)]
    fastest = min(by_name, key=lambda name: (by_name[name], name))
    if "backend" in by_name and fastest != "backend":
        ratio = by_name["backend"] / by_name[fastest]
        return f"At {bytes_text(max(shared))} {fastest} is fastest, {ratio:.2f} times the backend's own"
    return f"At {bytes_text(max(shared))} {fastest} is fastest"


def _color(algorithm: str) -> str:
    return f"algorithm:{algorithm}" if algorithm in ALGORITHM_COLORS else "other"
