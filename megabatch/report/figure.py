"""What a figure is: plain data that the page draws, that `report.drawing` draws into files, and that a CSV holds.

Every series says whether its numbers were measured, simulated or quoted, how many observations stand behind each, and
their spread where there is one. Texts say numbers as people read them: a unit that fits, digits that mean something.
Color goes by meaning: an algorithm, a part of the step or a role has one color on every page and in every file, light
and dark.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from megabatch.text import csv_text

Tag = Literal["measured", "simulated", "quoted", "ideal"]
Mark = Literal["line", "steps", "points", "bars"]
Value = float | str

# (light page, dark page). Hues after Okabe and Ito, told apart also by readers who do not see red and green alike.
_BLUE, _ORANGE, _GREEN = ("#0072b2", "#56b4e9"), ("#d55e00", "#ff9a4d"), ("#00795c", "#3fd0a4")
_VIOLET, _GOLD, _ROSE = ("#7b3fa0", "#c79bea"), ("#b8860b", "#f0c04a"), ("#b03a68", "#f284b0")
_INDIGO, _GREY, _PALE = ("#28489c", "#8fa8f8"), ("#606870", "#b0b8c0"), ("#808890", "#98a2ac")
COLORS = {
    "train": _BLUE,
    "validation": _ORANGE,
    "validation5": _GOLD,
    "lr": _VIOLET,
    "batch": _GREEN,
    "momentum": ("#8a5a00", "#e0b060"),
    "speed": _BLUE,
    "ideal": _PALE,
    "predicted": _PALE,
    "noise": _ROSE,
    "workers": _BLUE,
    "lost": _ORANGE,
    "joined": _GREEN,
    # Parts of a step.
    "data": _GOLD,
    "forward": _BLUE,
    "backward": _INDIGO,
    "compute": _BLUE,
    "communication": _ORANGE,
    "optimizer": _GREEN,
    "other": ("#a0a8b0", "#6a737c"),
}
ALGORITHM_COLORS = {
    "torus": _ORANGE,
    "two_way_torus": ("#a0410a", "#ffc08f"),
    "ring": _BLUE,
    "halving_doubling": _INDIGO,
    "hierarchical": _GREEN,
    "direct": _VIOLET,
    "exchange": _ROSE,
    "backend": _GREY,
    "auto": ("#20262c", "#f4f6f8"),
}
COLORS |= {f"algorithm:{name}": pair for name, pair in ALGORITHM_COLORS.items()}
RUN_COLORS = (_BLUE, _ORANGE, _GREEN, _VIOLET, _GOLD, _ROSE, _INDIGO, _GREY)
COLORS |= {f"run:{index}": pair for index, pair in enumerate(RUN_COLORS)}


def run_color(index: int) -> str:
    """The color of the index-th run of a comparison."""
    return f"run:{index % len(RUN_COLORS)}"


def algorithm_color(name: str) -> str:
    return f"algorithm:{name}" if name in ALGORITHM_COLORS else "other"


@dataclass(frozen=True, slots=True)
class Axis:
    """`title` with its unit in brackets; "log2" labels powers of two.

    ticks: where they stand and what they say, and of a category its order; by default what fits the values.
    floor: values below it would squeeze all others together; they are drawn at it, with their number.
    """

    title: str
    kind: Literal["linear", "log", "log2", "category"] = "linear"
    percent: bool = False  # values are parts of one, shown as percentages
    from_zero: bool = False
    ticks: tuple[tuple[Value, str], ...] = ()
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """`low` and `high` are the spread of each value; `n` the observations behind each, one number or one per value.

    labels: a word for each point, shown beside it while there are few, and on hover.
    single: the observations behind each value, drawn faint beside it.
    """

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
    faint: bool = False  # stays behind the others: single steps behind their smoothed curve
    group: str = ""  # bars of one group are stacked
    labels: tuple[str, ...] = ()
    single: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        columns = (self.x, self.y, self.low, self.high, self.n, self.labels, self.single)
        lengths = {len(values) for values in columns if values}
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
    horizontal: bool = False  # bars and spreads lie: `x` goes down the side, `y` along the bottom
    band: tuple[float, float] | None = None  # of `y`: from here to there values count as equal


@dataclass(frozen=True, slots=True)
class Missing:
    """A figure that would be here, and why it is not."""

    key: str
    title: str
    why: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A figure that would be a flat line, as a sentence."""

    key: str
    title: str
    text: str


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


def figure_csv(figure: Figure) -> str:
    """The CSV behind a figure. A cell that a spreadsheet would take for a formula gets a quote in front."""
    return csv_text([_harmless(cell) for cell in row] for row in csv_rows(figure))


def _harmless(cell: str) -> str:
    is_number = cell[1:2].isdigit() or cell[1:2] == "."
    return f"'{cell}" if cell[:1] in ("=", "@", "+", "-", "\t") and not is_number else cell
