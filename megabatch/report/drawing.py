"""Figures as files: SVG, PNG and CSV; same input, same bytes.

Only this file needs matplotlib, so that is an extra: `pip install megabatch[figures]`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

from megabatch.errors import ConfigError
from megabatch.files import write_atomically
from megabatch.report.figure import COLORS, Axis, Figure, Series, Value, figure_csv
from megabatch.text import bytes_text

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


def _drawing_files(figure: Figure) -> dict[str, bytes]:
    """The contents of the SVG and the PNG of a figure: bytes that depend on the figure alone."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    rows = len(_categories(figure)) if _is_lying(figure) else 0
    contents = {}
    with mpl.rc_context(_STYLE):
        drawing = Drawing(figsize=(9.0, 1.4 + 0.32 * rows) if rows else (7.2, 4.4), layout="constrained")
        _draw(drawing.add_subplot(), figure)
        for suffix, canvas in (("svg", FigureCanvasSVG), ("png", FigureCanvasAgg)):
            out = io.BytesIO()
            metadata = {"Date": None, "Creator": None} if suffix == "svg" else {"Software": None}
            canvas(drawing).print_figure(out, format=suffix, dpi=160, metadata=metadata)
            contents[suffix] = out.getvalue()
    return contents


def write_figures(figures: Iterable[Figure], folder: Path, *, tables: bool = True) -> list[Path]:
    """Write KEY.svg, KEY.png and, with `tables`, KEY.csv of every figure; returns the files."""
    if not has_matplotlib():
        raise ConfigError("--figures draws with matplotlib, which is not installed; pip install megabatch[figures]")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--figures '{folder}' cannot be made: {error.strerror}; give another folder") from None
    written = []
    for figure in figures:
        contents = ({"csv": figure_csv(figure).encode()} if tables else {}) | _drawing_files(figure)
        for suffix, content in contents.items():
            written.append(folder / f"{figure.key}.{suffix}")
            write_atomically(written[-1], content)
    return written


def _is_lying(figure: Figure) -> bool:
    """Whether values with their spread lie, one category below the other."""
    return figure.horizontal and all(one.mark != "bars" for one in figure.series)


def _categories(figure: Figure) -> list[Value]:
    """In the order of the axis, first the ones that it names."""
    return list(dict.fromkeys([v for v, _ in figure.x.ticks] + [x for one in figure.series for x in one.x]))


def _draw(axes: Any, figure: Figure) -> None:
    bottoms: dict[str, float] = {}
    repeated = [one for one in figure.series if one.single]
    if figure.band:
        span, line = (axes.axvspan, axes.axvline) if figure.horizontal else (axes.axhspan, axes.axhline)
        span(*figure.band, color="#e8edf5", zorder=0)
        line(sum(figure.band) / 2, color="#9fb3d1", linewidth=1, zorder=1)
    for one in figure.series:
        if one.mark == "bars":
            _draw_bars(axes, one, figure, bottoms)
        else:
            aside = repeated.index(one) - (len(repeated) - 1) / 2 if one.single else 0.0
            _draw_series(axes, one, figure, aside)
    for place, word in figure.marks:
        axes.axvline(place, color="#808890", linewidth=0.8, linestyle=":")
        axes.annotate(word, (place, 1), xycoords=("data", "axes fraction"), fontsize=8, va="top", color="#55606b")
    axes.set_title(figure.title, wrap=True)
    first, second = ("y", "x") if figure.horizontal else ("x", "y")
    _dress(axes, first, figure.x, [x for one in figure.series for x in one.x])
    _dress(axes, second, figure.y, [y for one in figure.series for y in one.y])
    if _is_lying(figure):
        names = _categories(figure)
        axes.set_yticks(range(len(names)), [str(name) for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_ylabel("")
        axes.grid(visible=False, axis="y")
    if repeated:
        axes.set_xlabel(f"{axes.get_xlabel()}\n{fill(figure.caption, 100)}")
    if len(figure.series) > 1 or (repeated and not figure.horizontal):
        if figure.horizontal or any(one.mark == "bars" for one in figure.series):  # they leave no room among them
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
        else:
            axes.legend(fontsize=8, ncols=2 if len(figure.series) > 6 else 1, loc="best")


def _look(one: Series) -> dict[str, Any]:
    label = one.name if one.tag in ("measured", "ideal") else f"{one.name} ({one.tag})"
    return {"color": COLORS.get(one.color, COLORS["other"])[0], "label": label}


def _draw_bars(axes: Any, one: Series, figure: Figure, floor: dict[str, float]) -> None:
    names = [str(x) for x in one.x]
    bottoms = [floor.get(name, 0.0) if one.group else 0.0 for name in names]
    if figure.horizontal:
        axes.barh(names, one.y, left=bottoms, height=0.5, **_look(one))
    else:
        axes.bar(names, one.y, bottom=bottoms, width=0.6, **_look(one))
    floor.update({name: low + y for name, low, y in zip(names, bottoms, one.y, strict=True)})


def _draw_series(axes: Any, one: Series, figure: Figure, aside: float) -> None:
    """A line or points with what is behind them; `aside` moves spreads of equal x, so that none hides another."""
    floor, style = -math.inf if figure.y.floor is None else figure.y.floor, _look(one)
    color = style["color"]
    places = {name: place for place, name in enumerate(_categories(figure) if figure.horizontal else ())}
    is_log = figure.x.kind in ("log", "log2")
    xs = [places.get(x, x * 1.018**aside if is_log and not isinstance(x, str) else x) for x in one.x]

    def at(xs: Sequence[Value], ys: Sequence[float]) -> tuple[Sequence[Value], Sequence[Value]]:
        shown = [max(y, floor) for y in ys]
        return (shown, xs) if figure.horizontal else (xs, shown)

    if one.mark == "points":
        kind = {"marker": "|", "markersize": 11, "mew": 2} if figure.horizontal else {"marker": "o", "markersize": 5}
        axes.plot(*at(xs, one.y), linestyle="", **kind, **style)
        for x, y, word in zip(one.x, one.y, one.labels, strict=bool(one.labels)):
            axes.annotate(word, (x, y), (4, -10), textcoords="offset points", fontsize=7, color=color)
    else:
        drawstyle = "steps-post" if one.mark == "steps" else "default"
        marker = "o" if len(one.x) <= 40 and one.tag == "measured" else None
        style |= {"linewidth": 0.7, "alpha": 0.35} if one.faint else {"linewidth": 1.6, "marker": marker}
        line, size = "--" if one.dashed else "-", 5.5 if one.single else 3.5
        axes.plot(*at(*_with_gaps(xs, one.y)), line, drawstyle=drawstyle, markersize=size, **style)
    for x, y, values in zip(xs, one.y, one.single, strict=bool(one.single)):
        beside = x + 0.22 if figure.horizontal and not isinstance(x, str) else x
        behind = {"alpha": 0.5, "markersize": 4, "mew": 0, "color": color}
        axes.plot(*at([beside] * len(values), values), "o", **behind)
        if y < floor:
            word = f"{100 * y:.1f} %" if figure.y.percent else f"{y:.4g}"
            place, away, side = ((floor, x), (8, -3), "left") if figure.horizontal else ((x, floor), (-8, 0), "right")
            axes.annotate(f"{word}, off the scale", place, away, textcoords="offset points", ha=side, fontsize=8)
    if one.low:
        below = [max(0.0, y - low) * (y >= floor) for y, low in zip(one.y, one.low, strict=True)]
        above = [max(0.0, high - y) * (y >= floor) for y, high in zip(one.y, one.high, strict=True)]
        bars = {"xerr" if figure.horizontal else "yerr": [below, above]}
        width = 1.8 if one.single else 1.0
        axes.errorbar(*at(xs, one.y), **bars, fmt="none", ecolor=color, elinewidth=width, capsize=3)


def _with_gaps(xs: Sequence[Value], ys: Sequence[float]) -> tuple[list[Value], list[float]]:
    """The values with a gap wherever x goes back: there a branch of the run ends and its trunk goes on."""
    found: list[tuple[Value, float]] = []
    for x, y in zip(xs, ys, strict=True):
        if found and not isinstance(x, str) and not isinstance(found[-1][0], str) and x < found[-1][0]:
            found.append((x, math.nan))
        found.append((x, y))
    return [x for x, _ in found], [y for _, y in found]


def _dress(axes: Any, which: str, axis: Axis, values: Sequence[float | str]) -> None:
    """Title with unit, scale, ticks."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    getattr(axes, f"set_{which}label")(axis.title)
    ticks = getattr(axes, f"{which}axis")
    if axis.kind in ("log", "log2"):
        getattr(axes, f"set_{which}scale")("log", base=2 if axis.kind == "log2" else 10)
        positive = [v for v in values if not isinstance(v, str) and v > 0]
        if axis.kind == "log":
            ticks.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            # 2 and 5 between the powers of ten; the rest would crowd.
            ticks.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else ""))
        if axis.kind == "log2" and positive and not axis.ticks:
            first, last = math.floor(math.log2(min(positive))), math.ceil(math.log2(max(positive)))
            ticks.set_ticks([2.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 7)))])
            as_bytes = "bytes" in axis.title
            ticks.set_major_formatter(FuncFormatter(lambda v, _: bytes_text(v) if as_bytes else f"{v:,.0f}"))
            ticks.set_minor_formatter(NullFormatter())
    if axis.ticks and axis.kind != "category":
        ticks.set_ticks([value for value, _ in axis.ticks], [word for _, word in axis.ticks])
        ticks.set_minor_locator(NullLocator())
    if axis.kind == "category" and which == "x" and len(set(values)) > 8:
        axes.tick_params(axis="x", rotation=90, labelsize=7)
    if axis.percent:
        ticks.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.6g} %"))
    if axis.from_zero and axis.kind == "linear" and all(v >= 0 for v in values if not isinstance(v, str)):
        getattr(axes, f"set_{which}lim")(**{"bottom" if which == "y" else "left": 0})
