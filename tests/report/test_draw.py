"""Figures as files: whole, equal on repetition, with the CSV behind them."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from megabatch.errors import ConfigError
from megabatch.report.draw import write_figures
from megabatch.report.figure import Axis, Figure, Series, csv_text
from megabatch.report.network import NetworkTimes
from megabatch.report.page import all_figures
from megabatch.report.run import read_run
from tests.report.folders import HOSTILE, make_run

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
    found = all_figures([read_run(folder)], NetworkTimes(CELLS, CELLS))
    return [one for one in found if isinstance(one, Figure)]


def test_three_files_a_figure_equal_on_repetition(tmp_path: Path) -> None:
    made = figures(make_run(tmp_path / "a"))
    files = write_figures(made, tmp_path / "one")
    assert len(files) == 3 * len(made) == 27
    write_figures(made, tmp_path / "two")
    for path in files:
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    for figure in made:
        assert (tmp_path / "one" / f"{figure.key}.csv").read_text() == csv_text(figure)
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
