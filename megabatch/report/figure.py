"""What a figure is: plain data that the page draws, that matplotlib draws into files, and that a CSV holds.

Files are SVG, PNG and CSV: same input, same bytes. Only `write_figures` needs matplotlib, so that is an extra:
`pip install megabatch[figures]`.

Every series says whether its numbers were measured, simulated or quoted, how many observations stand behind each, and
their spread where there is one. Texts say numbers as people read them: a unit that fits, digits that mean something.
Color goes by meaning: an algorithm, a part of the step or a role has one color on every page and in every file, light
and dark.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megabatch.errors import ConfigError
from megabatch.files import write_atomically
from megabatch.text import bytes_text, csv_text

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
    """`title` with its unit in brackets; "log2" labels powers of two."""

    title: str
    kind: Literal["linear", "log", "log2", "category"] = "linear"
    percent: bool = False  # values are parts of one, shown as percentages
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """`low` and `high` are the spread of each value; `n` the observations behind each, one number or one per value.

    labels: a word for each point, shown beside it while there are few, and on hover.
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

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (self.x, self.y, self.low, self.high, self.n, self.labels) if values}
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


_STYLE: Any = {
    "svg.hashsalt": "megabatch",  # ids in the SVG depend on the drawing alone
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e8ec",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar sign in a run's name is a dollar sign
    "path.simplify": False,
}


def has_matplotlib() -> bool:
    """Whether figures can be drawn into files here."""
    return find_spec("matplotlib") is not None


def drawing_files(drawing: Any) -> dict[str, bytes]:
    """The contents of the SVG and the PNG of a matplotlib figure: bytes that depend on the drawing alone."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    contents = {}
    with mpl.rc_context(_STYLE):
        for suffix, canvas in (("svg", FigureCanvasSVG), ("png", FigureCanvasAgg)):
            out = io.BytesIO()
            metadata = {"Date": None, "Creator": None} if suffix == "svg" else {"Software": None}
            canvas(drawing).print_figure(out, format=suffix, dpi=160, metadata=metadata)
            contents[suffix] = out.getvalue()
    return contents


def write_figures(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """Write KEY.svg, KEY.png and KEY.csv of every figure; returns the files."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        raise ConfigError(
            "--figures draws with matplotlib, which is not installed; pip install megabatch[figures]"
        ) from None

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--figures '{folder}' cannot be made: {error.strerror}; give another folder") from None
    written = []
    for figure in figures:
        contents = {"csv": figure_csv(figure).encode()}
        with mpl.rc_context(_STYLE):
            drawing = Drawing(figsize=(7.2, 4.4), layout="constrained")
            _draw(drawing.add_subplot(), figure)
        contents |= drawing_files(drawing)
        for suffix, content in contents.items():
            written.append(folder / f"{figure.key}.{suffix}")
            write_atomically(written[-1], content)
    return written


def _draw(axes: Any, figure: Figure) -> None:
    floor: dict[str, float] = {}
    for one in figure.series:
        _draw_series(axes, one, figure, floor)
    for place, word in figure.marks:
        axes.axvline(place, color="#808890", linewidth=0.8, linestyle=":")
        axes.annotate(word, (place, 1), xycoords=("data", "axes fraction"), fontsize=8, va="top", color="#55606b")
    axes.set_title(figure.title, wrap=True)
    first, second = ("y", "x") if figure.horizontal else ("x", "y")
    _dress(axes, first, figure.x, [x for one in figure.series for x in one.x])
    _dress(axes, second, figure.y, [y for one in figure.series for y in one.y])
    if len(figure.series) > 1:
        if any(one.mark == "bars" for one in figure.series):  # bars leave no room among them
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
        else:
            axes.legend(fontsize=8, ncols=2 if len(figure.series) > 6 else 1, loc="best")


def _draw_series(axes: Any, one: Series, figure: Figure, floor: dict[str, float]) -> None:
    color = COLORS.get(one.color, COLORS["other"])[0]
    label = one.name if one.tag in ("measured", "ideal") else f"{one.name} ({one.tag})"
    if one.mark == "bars":
        names = [str(x) for x in one.x]
        bottoms = [floor.get(name, 0.0) if one.group else 0.0 for name in names]
        if figure.horizontal:
            axes.barh(names, one.y, left=bottoms, color=color, label=label, height=0.5)
        else:
            axes.bar(names, one.y, bottom=bottoms, color=color, label=label, width=0.6)
        floor.update({name: low + y for name, low, y in zip(names, bottoms, one.y, strict=True)})
        return
    style: dict[str, Any] = {"color": color, "label": label}
    if one.mark == "points":
        axes.plot(one.x, one.y, "o", markersize=5, **style)
        for x, y, word in zip(one.x, one.y, one.labels, strict=bool(one.labels)):
            axes.annotate(word, (x, y), (4, -10), textcoords="offset points", fontsize=7, color=color)
    else:
        drawstyle = "steps-post" if one.mark == "steps" else "default"
        marker = "o" if len(one.x) <= 40 and one.tag == "measured" else None
        style |= {"linewidth": 0.7, "alpha": 0.35} if one.faint else {"linewidth": 1.6, "marker": marker}
        line = "--" if one.dashed else "-"
        xs, ys = _with_gaps(one)
        axes.plot(xs, ys, line, drawstyle=drawstyle, markersize=3.5, **style)
    if one.low:
        below = [max(0.0, y - low) for y, low in zip(one.y, one.low, strict=True)]
        above = [max(0.0, high - y) for y, high in zip(one.y, one.high, strict=True)]
        axes.errorbar(one.x, one.y, yerr=[below, above], fmt="none", ecolor=color, elinewidth=1, capsize=3)


def _with_gaps(one: Series) -> tuple[list[float | str], list[float]]:
    """The values with a gap wherever x goes back: there a branch of the run ends and its trunk goes on."""
    xs: list[float | str] = []
    ys: list[float] = []
    for x, y in zip(one.x, one.y, strict=True):
        if xs and not isinstance(x, str) and not isinstance(xs[-1], str) and x < xs[-1]:
            xs.append(x)
            ys.append(math.nan)
        xs.append(x)
        ys.append(y)
    return xs, ys


def _dress(axes: Any, which: str, axis: Axis, values: Sequence[float | str]) -> None:
    """Title with unit, scale, ticks."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

    getattr(axes, f"set_{which}label")(axis.title)
    ticks = getattr(axes, f"{which}axis")
    if axis.kind in ("log", "log2"):
        getattr(axes, f"set_{which}scale")("log", base=2 if axis.kind == "log2" else 10)
        positive = [v for v in values if not isinstance(v, str) and v > 0]
        if axis.kind == "log":
            ticks.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            # 2 and 5 between the powers of ten; the rest would crowd.
            ticks.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else ""))
        if axis.kind == "log2" and positive:
            first, last = math.floor(math.log2(min(positive))), math.ceil(math.log2(max(positive)))
            ticks.set_ticks([2.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 7)))])
            as_bytes = "bytes" in axis.title
            ticks.set_major_formatter(FuncFormatter(lambda v, _: bytes_text(v) if as_bytes else f"{v:,.0f}"))
            ticks.set_minor_formatter(NullFormatter())
    if axis.kind == "category" and which == "x" and len(set(values)) > 8:
        axes.tick_params(axis="x", rotation=90, labelsize=7)
    if axis.percent:
        ticks.set_major_formatter(PercentFormatter(xmax=1))
    if axis.from_zero and axis.kind == "linear" and all(v >= 0 for v in values if not isinstance(v, str)):
        getattr(axes, f"set_{which}lim")(**{"bottom" if which == "y" else "left": 0})
