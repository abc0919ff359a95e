"""The sections of the page: order, table alternatives, accessible names, no markup from runs."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

from megabatch.report.figure import Axis, Figure, Missing, Series
from megabatch.report.network import NetworkTimes, torus_as_data
from megabatch.report.page import all_figures
from megabatch.report.run import read_run, read_runs
from megabatch.report.sections import (
    chip,
    claim_section,
    conditions_section,
    definitions,
    figures_section,
    html_table,
    repeat_section,
    thin,
)
from tests.report.folders import HOSTILE, make_hostile_run, make_run


class Elements(HTMLParser):
    """Counts elements and checks that they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def figures_html(folder: Path) -> str:
    run = read_run(folder)
    found = all_figures([run])
    figures = [one for one in found if isinstance(one, Figure)]
    missing = [one for one in found if isinstance(one, Missing)]
    return figures_section(figures, missing, torus_as_data(run, NetworkTimes()))


def test_every_figure_has_a_heading_a_name_and_a_table(tmp_path: Path) -> None:
    html = figures_html(make_run(tmp_path / "a"))
    elements = Elements(html)
    plots = [attributes for _, attributes in elements.seen if (attributes.get("class") or "").startswith("plot")]
    assert len(plots) == 8
    assert all(one["role"] == "img" and one["aria-label"] for one in plots)
    assert html.count("<h3>") == html.count("<figure ") == 9
    assert html.count("<table>") == 8
    assert "6 figures are not here, and why" in html


def test_no_row_of_cards_has_a_gap() -> None:
    def figure(key: str) -> Figure:
        return Figure(key, "t", "c", Axis("x"), Axis("y"), (Series("s", "train", (1.0,), (1.0,)),))

    html = figures_section([figure(key) for key in ("a", "b", "c", "ranks", "d", "e", "step_split", "f")], [], None)
    assert re.findall(r'class="card wide" id="figure-(\w+)"', html) == ["c", "ranks", "step_split", "f"]


def test_tables_are_short_and_say_of_how_many_values(tmp_path: Path) -> None:
    html = figures_html(make_run(tmp_path / "a", num_steps=500))
    assert "40 of 1,020 values" in html  # of the loss: 500 steps, 500 smoothed, 20 evaluations
    assert max(table.count("<tr>") for table in re.findall(r"<table>.*?</table>", html)) <= 41


def test_all_sections_nest_also_for_hostile_runs(tmp_path: Path) -> None:
    hostile = make_hostile_run(tmp_path / "bad")
    for runs in ([read_run(hostile)], read_runs([hostile, make_run(tmp_path / "b")])):
        for section in (claim_section, conditions_section, repeat_section):
            elements = Elements(section(runs))
            assert not {tag for tag, _ in elements.seen} & {"script", "img"}
    elements = Elements(figures_html(hostile))
    assert not {tag for tag, _ in elements.seen} & {"script", "img"}


def test_a_comparison_shows_results_and_what_differs(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=3)])
    assert "Results, all measured" in claim_section(runs)
    assert "<td>train.seed</td><td>0</td><td>3</td>" in conditions_section(runs)
    assert "settings of these runs are equal" in conditions_section([runs[0], runs[0]])


def test_a_broken_reference_is_shown_as_such(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "summary.json").write_text((folder / "summary.json").read_text().replace("0.9117", "0.5"))
    assert "not reached" in claim_section([read_run(folder)])
    assert ">reached<" in claim_section([read_run(make_run(tmp_path / "b"))])


def test_every_piece_escapes() -> None:
    pieces = [chip(HOSTILE, HOSTILE), html_table(HOSTILE, [HOSTILE], [[HOSTILE]]), definitions([(HOSTILE, HOSTILE)])]
    for piece in pieces:
        assert "<script" not in piece
        assert "<img" not in piece
        assert 'onerror="' not in piece
    assert escape("\"'<>&") == "&quot;&#x27;&lt;&gt;&amp;"


def test_tables_have_captions_scopes_and_right_aligned_numbers() -> None:
    made = html_table("what", ["name", "value"], [["a", "1.5"], ["b", "-"], ["c", "-3"]])
    assert "<caption>what</caption>" in made
    assert made.count('scope="col"') == 2
    assert made.count('class="number"') == 4
    assert 'class="number"' not in html_table("what", ["value"], [["1"]], numeric=False)


def test_thinning_keeps_the_ends() -> None:
    assert list(thin(3, 5)) == [0, 1, 2]
    assert list(thin(100, 5)) == [0, 25, 50, 74, 99]
    assert len(thin(10_000, 40)) == 40
