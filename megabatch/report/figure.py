"""What a figure is: plain data that the page draws, that matplotlib draws into files, and that a CSV holds.

Every series says whether its numbers were measured, simulated or quoted, how many observations stand behind each, and
their spread where there is one. Color goes by meaning: an algorithm, a part of the step or a role has one color on
every page and in every file, light and dark.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = [
    "ALGORITHM_COLORS",
    "COLORS",
    "Axis",
    "Figure",
    "Missing",
    "Series",
    "algorithm_color",
    "csv_rows",
    "csv_text",
    "figure_as_data",
    "run_color",
    "thin",
]

Tag = Literal["measured", "simulated", "quoted", "ideal"]
Mark = Literal["line", "steps", "points", "bars"]
Value = float | str

# (light page, dark page). Hues after Okabe and Ito, told apart also by readers who do not see red and green alike.
COLORS: dict[str, tuple[str, str]] = {
    "train": ("#0072b2", "#56b4e9"),
    "validation": ("#d55e00", "#ff9a4d"),
    "validation5": ("#b8860b", "#f0c04a"),
    "rate": ("#7b3fa0", "#c79bea"),
    "batch": ("#00795c", "#3fd0a4"),
    "momentum": ("#8a5a00", "#e0b060"),
    "speed": ("#0072b2", "#56b4e9"),
    "ideal": ("#808890", "#98a2ac"),
    "predicted": ("#808890", "#98a2ac"),
    "noise": ("#b03a68", "#f284b0"),
    "data": ("#b8860b", "#f0c04a"),
    "forward": ("#0072b2", "#56b4e9"),
    "backward": ("#28489c", "#8fa8f8"),
    "compute": ("#0072b2", "#56b4e9"),
    "communication": ("#d55e00", "#ff9a4d"),
    "optimizer": ("#00795c", "#3fd0a4"),
    "other": ("#a0a8b0", "#6a737c"),
}
ALGORITHM_COLORS: dict[str, tuple[str, str]] = {
    "torus": ("#d55e00", "#ff9a4d"),
    "two_way_torus": ("#a0410a", "#ffc08f"),
    "ring": ("#0072b2", "#56b4e9"),
    "halving_doubling": ("#28489c", "#8fa8f8"),
    "hierarchical": ("#00795c", "#3fd0a4"),
    "direct": ("#7b3fa0", "#c79bea"),
    "exchange": ("#b03a68", "#f284b0"),
    "backend": ("#606870", "#b0b8c0"),
    "auto": ("#20262c", "#f4f6f8"),
}
COLORS |= {f"algorithm:{name}": pair for name, pair in ALGORITHM_COLORS.items()}
RUN_COLORS: tuple[tuple[str, str], ...] = (
    *(("#0072b2", "#56b4e9"), ("#d55e00", "#ff9a4d"), ("#00795c", "#3fd0a4"), ("#7b3fa0", "#c79bea")),
    *(("#b8860b", "#f0c04a"), ("#b03a68", "#f284b0"), ("#28489c", "#8fa8f8"), ("#606870", "#b0b8c0")),
)
COLORS |= {f"run:{index}": pair for index, pair in enumerate(RUN_COLORS)}


def run_color(index: int) -> str:
    """The color of the index-th run of a comparison."""
    return f"run:{index % len(RUN_COLORS)}"


def algorithm_color(name: str) -> str:
    """The color of an all-reduce algorithm."""
    return f"algorithm:{name}" if name in ALGORITHM_COLORS else "other"


@dataclass(frozen=True, slots=True)
class Axis:
    """`title` with its unit in brackets; "log2" labels powers of two."""

    title: str
    kind: Literal["linear", "log", "log2", "category"] = "linear"
    percent: bool = False  # values are parts of one, shown as percentages
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """`low` and `high` are the spread of each value; `n` the observations behind each, one number or one per value."""

    name: str
    color: str
    x: tuple[Value, ...]
    y: tuple[float, ...]
    tag: Tag = "measured"
    mark: Mark = "line"
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    n: tuple[int, ...] = ()
    dashed: bool = False
    group: str = ""  # bars of one group are stacked

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (self.x, self.y, self.low, self.high, self.n) if values}
        assert len(lengths) <= 1, f"series {self.name} has columns of lengths {lengths}"


@dataclass(frozen=True, slots=True)
class Figure:
    """`title` says what is to be seen, `caption` how it was obtained: n, spread, what was left out."""

    key: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[tuple[float, str], ...] = ()  # vertical lines with a word: phases of the run
    horizontal: bool = False  # bars lie: `x` goes down the side, `y` along the bottom


@dataclass(frozen=True, slots=True)
class Missing:
    """A figure that would be here, and why it is not."""

    key: str
    title: str
    why: str


def figure_as_data(figure: Figure) -> dict[str, Any]:
    """The figure for the page's JSON; its caption is in the page itself."""
    return {name: value for name, value in asdict(figure).items() if name != "caption"}


def csv_rows(figure: Figure) -> list[list[str]]:
    """One row per value: series, tag, x, y, low, high, n. Numbers as `repr`, so that they read back equal."""
    rows = [["series", "tag", figure.x.title, figure.y.title, "low", "high", "n"]]
    for one in figure.series:
        for index, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
            spread = [repr(values[index]) if values else "" for values in (one.low, one.high, one.n)]
            rows.append([one.name, one.tag, x if isinstance(x, str) else repr(x), repr(y), *spread])
    return rows


def csv_text(figure: Figure) -> str:
    """The CSV behind a figure. A cell that a spreadsheet would take for a formula gets a quote in front."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[_harmless(cell) for cell in row] for row in csv_rows(figure)])
    return out.getvalue()


def _harmless(cell: str) -> str:
    is_number = cell[1:2].isdigit() or cell[1:2] == "."
    return f"'{cell}" if cell[:1] in ("=", "@", "+", "-", "\t") and not is_number else cell


def thin(indices: int, limit: int) -> Sequence[int]:
    """At most `limit` positions spread evenly over `indices`, first and last among them."""
    if indices <= limit:
        return range(indices)
    return sorted({round(step * (indices - 1) / (limit - 1)) for step in range(limit)})
