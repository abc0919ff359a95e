"""Figures as data: the CSV holds what the page draws, colors are one per meaning."""

from __future__ import annotations

import csv
import io
import json

import pytest

from megabatch.comm.phases import ALGORITHMS
from megabatch.report.figure import (
    ALGORITHM_COLORS,
    COLORS,
    Axis,
    Figure,
    Series,
    figure_as_data,
    figure_csv,
    run_color,
)

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
