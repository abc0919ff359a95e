"""Figures as data: the CSV holds what the page draws, colors are one per meaning."""

from __future__ import annotations

import csv
import io
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from megabatch.comm.phases import ALGORITHMS
from megabatch.errors import ConfigError
from megabatch.report.figure import (
    ALGORITHM_COLORS,
    COLORS,
    Axis,
    Figure,
    Series,
    figure_as_data,
    figure_csv,
    run_color,
    write_figures,
)
from megabatch.report.network import NetworkTimes
from megabatch.report.page import all_figures
from megabatch.report.run import read_run
from tests.report.folders import HOSTILE, make_run

FIGURE = Figure(
    "k",
    "t",
    "c",
    Axis("epoch"),
    Axis("loss [nats]"),
    (
        Series("a", "train", (0.1, 1 / 3), (1e-17, 2.0), low=(0.5, 1.5), high=(1.5, 2.5), n=(3, 4)),
        Series('=cmd|"x"', "other", ("r,1", "-r2"), (-1.5, 3.0), tag="simulated", mark="bars"),
    ),
)


def test_csv_reads_back_equal_to_the_data_of_the_page() -> None:
    rows = list(csv.reader(io.StringIO(figure_csv(FIGURE))))
    assert rows[0] == ["series", "tag", "epoch", "loss [nats]", "low", "high", "n"]
    data = json.loads(json.dumps(figure_as_data(FIGURE)))
    first, second = data["series"]
    assert [float(r[2]) for r in rows[1:3]] == first["x"]
    assert [float(r[3]) for r in rows[1:3]] == first["y"] == [1e-17, 2.0]
    assert [[float(r[4]), float(r[5]), int(r[6])] for r in rows[1:3]] == [[0.5, 1.5, 3], [1.5, 2.5, 4]]
    assert [float(r[3]) for r in rows[3:]] == second["y"]
    assert [r[1] for r in rows[1:]] == ["measured", "measured", "simulated", "simulated"]


def test_a_spreadsheet_meets_no_formula() -> None:
    rows = list(csv.reader(io.StringIO(figure_csv(FIGURE))))
    assert rows[3][0] == '\'=cmd|"x"'
    assert rows[4][2] == "'-r2"
    assert rows[3][3] == "-1.5"  # a negative number stays one


def test_every_algorithm_has_its_own_colour_on_both_pages() -> None:
    assert set(ALGORITHM_COLORS) == {*ALGORITHMS, "auto"}
    for side in (0, 1):
        assert len({pair[side] for pair in ALGORITHM_COLORS.values()}) == len(ALGORITHM_COLORS)
    assert {run_color(index) for index in range(50)} <= set(COLORS)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", [name for name in COLORS if name != "other"])
def test_colors_stand_out_from_their_card(name: str) -> None:
    """WCAG 2.2, 1.4.11: graphical objects need a contrast of at least 3."""
    for color, card in zip(COLORS[name], ("#f6f8fa", "#1d2329"), strict=True):
        lighter, darker = sorted((luminance(color), luminance(card)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3.0


def test_columns_of_a_series_are_equally_long() -> None:
    with pytest.raises(AssertionError, match="lengths"):
        Series("a", "train", (1.0, 2.0), (1.0,))


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
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"megabatch\[figures\]"):
        write_figures([], tmp_path / "x")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give another folder"):
        write_figures([], tmp_path / "file" / "x")
