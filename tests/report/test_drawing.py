"""Figures as files: same input, same bytes; what is drawn is where the numbers say."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megabatch.errors import ConfigError
from megabatch.report import drawing
from megabatch.report.drawing import _draw, write_figures
from megabatch.report.figure import Axis, Figure, Series, figure_csv
from megabatch.report.network import NetworkTimes
from megabatch.report.page import all_figures
from megabatch.report.run import read_run
from tests.report.folders import HOSTILE, make_run

pytest.importorskip("matplotlib")

CELLS = tuple(
    {
        "algorithm": name,
        "message_bytes": 2**power,
        "p50_seconds": 2.0**power,
        "p95_seconds": 2.1**power,
        "iterations": 9,
    }
    for name in ("torus", "backend")
    for power in (10, 15, 20)
)


def figures(folder: Path) -> list[Figure]:
    found = all_figures([read_run(folder)], NetworkTimes(CELLS, {"torus": [(2.0**10, 1.0), (2.0**20, 900.0)]}))
    return [one for one in found if isinstance(one, Figure)]


def test_three_files_a_figure_equal_on_repetition(tmp_path: Path) -> None:
    made = figures(make_run(tmp_path / "a"))
    files = write_figures(made, tmp_path / "one")
    assert len(files) == 3 * len(made) == 27
    write_figures(made, tmp_path / "two")
    for path in files:
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    for figure in made:
        assert (tmp_path / "one" / f"{figure.key}.csv").read_text() == figure_csv(figure)
        with Image.open(tmp_path / "one" / f"{figure.key}.png") as image:
            assert image.size[0] > 1000
            extremes = image.convert("L").getextrema()
            assert extremes[0] < 100  # type: ignore[operator]
        root = ET.fromstring((tmp_path / "one" / f"{figure.key}.svg").read_text())
        words = "".join(text for text in root.itertext())
        assert figure.y.title in words
        assert figure.x.title in words


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    series = Series(HOSTILE, "train", (HOSTILE, "$\\frac{1}{0}$"), (1.0, 2.0), mark="bars")
    write_figures([Figure("k", HOSTILE, "", Axis(HOSTILE, "category"), Axis("y [$]"), (series,) * 2)], tmp_path)
    text = (tmp_path / "k.svg").read_text()
    assert "<script" not in text
    assert "<img" not in text


def test_a_missing_library_says_which_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "has_matplotlib", lambda: False)
    with pytest.raises(ConfigError, match=r"megabatch\[figures\]"):
        write_figures([], tmp_path / "x")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give another folder"):
        write_figures([], tmp_path / "file" / "x")


def drawn(figure: Figure) -> Any:
    """The axes of a figure."""
    from matplotlib.figure import Figure as Drawing

    axes = Drawing().add_subplot()
    _draw(axes, figure)
    return axes


def points(axes: Any) -> set[tuple[float, float]]:
    return {
        (round(float(x), 6), round(float(y), 6))
        for line in axes.lines
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }


ARMS = Axis("arm", "category", ticks=(("one", "one"), ("two", "two"), ("lost", "lost")))
SPREAD = Series(
    "a",
    "run:0",
    ("two", "lost"),
    (0.8, 0.2),
    mark="points",
    low=(0.7, 0.1),
    high=(0.9, 0.3),
    single=((0.7, 0.9), (0.1,)),
)
OTHER = Series("b", "run:1", ("one",), (0.85,), mark="points", low=(0.8,), high=(0.9,), single=((0.85,),))


def test_spreads_lie_in_the_order_of_the_axis_and_what_is_below_the_floor_squeezes_nothing() -> None:
    y = Axis("top-1", percent=True, floor=0.6)
    axes = drawn(Figure("k", "t", "Points: seeds.", ARMS, y, (SPREAD, OTHER), horizontal=True, band=(0.75, 0.85)))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two", "lost"]
    assert {(0.85, 0.0), (0.8, 1.0), (0.6, 2.0)} <= points(axes)  # means
    assert {(0.85, 0.22), (0.7, 1.22), (0.9, 1.22), (0.6, 2.22)} <= points(axes)  # what is behind them
    assert "20.0 %, off the scale" in [text.get_text() for text in axes.texts]
    assert axes.get_xlim()[0] > 0.5
    [band] = axes.patches
    assert (band.get_x(), band.get_width()) == pytest.approx((0.75, 0.1))
    assert axes.get_xlabel() == "top-1\nPoints: seeds."


def test_ticks_stand_where_they_are_told_and_equal_places_do_not_hide_each_other() -> None:
    x = Axis("batch", "log2", ticks=((50, "50 (1 %)"), (400, "400 (8 %)")))
    lines = [
        Series(name, "run:0", (50, 400), (0.8, 0.7), low=(0.7, 0.6), high=(0.9, 0.75), single=((0.8,), (0.7,)))
        for name in "ab"
    ]
    axes = drawn(Figure("k", "t", "c", x, Axis("top-1"), tuple(lines)))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["50 (1 %)", "400 (8 %)"]
    places = {x for x, y in points(axes) if y == 0.8}
    assert len(places) == 2
    assert all(place == pytest.approx(50, rel=0.02) for place in places)
