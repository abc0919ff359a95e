"""The report in a real browser: drawn without complaints, usable, equal to its CSV, safe, and fit for a phone."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from megabatch.comm.calibration import AxisCost, Calibration, MeasuredPoint, write_calibration_file
from megabatch.report.figure import Figure, figure_csv
from megabatch.report.page import all_figures, write_report
from megabatch.report.run import read_run
from tests.report.folders import add_membership, change, make_hostile_run, make_run
from tests.system.browser import Watched, open_browser, open_page, wait_until

pytestmark = pytest.mark.timeout(300)

# What stands on the screen, read back as numbers: two labelled ticks give the scale of a linear axis.
READ_BACK = """key => {
    const svg = document.querySelector(`#plot-${key} svg.drawing`);
    const number = text => Number(text.replace(/[, %]/g, '')) / (text.includes('%') ? 100 : 1);
    const ticks = (kind, attribute, shift) => [...svg.querySelectorAll(`.tick.${kind}`)].map(
        one => [Number(one.getAttribute(attribute)) - shift, number(one.textContent)]);
    const inverse = all => {
        const [a, va] = all[0], [b, vb] = all.at(-1);
        return p => va + (p - a) / (b - a) * (vb - va);
    };
    const x = inverse(ticks('x', 'x', 0)), y = inverse(ticks('y', 'y', 4));
    return [...svg.querySelectorAll('.series')].map(one => {
        const path = one.querySelector('path:not(.spread)')?.getAttribute('d').match(/[\\d.]+ [\\d.]+/g);
        const circles = [...one.querySelectorAll('circle')].map(c => `${c.getAttribute('cx')} ${c.getAttribute('cy')}`);
        const drawn = (path ?? circles).map(text => text.split(' ').map(Number));
        return {name: one.dataset.name, points: drawn.map(([a, b]) => [x(a), y(b)])};
    });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "one", num_steps=300, noise_scale=700.0)
    points = tuple(
        MeasuredPoint(name, 2**power, 2.0**power / 1e8) for name in ("torus", "backend") for power in (10, 20)
    )
    axes = (AxisCost(1e-3, 1e8, name="column", size=2), AxisCost(1e-4, 1e9, name="row", size=2))
    write_calibration_file(folder / "calibration.json", Calibration("2x2", 1, "gloo", axes, points))
    prediction = {"step_seconds": {"low": 0.08, "middle": 0.09, "high": 0.12}}
    (folder / "plan.json").write_text(json.dumps({"prediction": prediction}))
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"members": [{"member": 0, "top1": 0.9}, {"member": 1, "top1": 0.91}], "trunk_top1": 0.905}
    (folder / "summary.json").write_text(json.dumps(summary))
    add_membership(folder, change(90, 3, lost=1), change(120, 4, joined=1))
    write_report([folder], folder / "report.html")
    return folder


@pytest.fixture(scope="module")
def desk(browser: Browser, folder: Path) -> Iterator[Watched]:
    """The page on a wide screen, opened once for all tests that can share it."""
    with open_page(browser, folder / "report.html") as watched:
        yield watched
        assert watched.complaints == []


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_every_figure_is_drawn_and_curves_read_back_as_the_values_of_their_csv(desk: Watched, folder: Path) -> None:
    figures = [one for one in all_figures([read_run(folder)]) if isinstance(one, Figure)]
    assert len(figures) == 13  # all but momentum, which is constant, and what takes several runs
    for figure in figures:
        place = f"#plot-{figure.key} .series"
        shown = desk.page.evaluate(f"[...document.querySelectorAll('{place}')].map(e => e.dataset.name)")
        assert shown == [one.name for one in figure.series]
        for index, one in enumerate(figure.series):
            group = desk.page.locator(place).nth(index)
            if one.mark in ("bars", "points"):
                assert group.locator("rect" if one.mark == "bars" else "circle").count() == len(one.x)
            else:
                assert group.locator("path:not(.spread)").count() == 1
    for key in ("accuracy", "loss", "lr", "images_per_second"):
        rows = list(csv.reader(io.StringIO(figure_csv(next(one for one in figures if one.key == key)))))[1:]
        drawn = [(one["name"], x, y) for one in desk.page.evaluate(READ_BACK, key) for x, y in one["points"]]
        assert [name for name, *_ in drawn] == [name for name, *_ in rows]
        for (_, x, y), (_, _, wanted_x, wanted_y, *_) in zip(drawn, rows, strict=True):
            assert x == pytest.approx(float(wanted_x), abs=0.02)  # a hundredth of a pixel and digits of the ticks
            assert y == pytest.approx(float(wanted_y), rel=0.002, abs=0.002)
    assert desk.complaints == []


def test_the_saved_csv_is_the_one_of_the_files(desk: Watched, folder: Path) -> None:
    figure = next(one for one in all_figures([read_run(folder)]) if isinstance(one, Figure) and one.key == "loss")
    page = desk.page
    page.locator("#table-loss summary").click()
    with page.expect_download() as download:
        page.locator('button[data-csv="loss"]').click()
    saved = list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))
    wanted = list(csv.reader(io.StringIO(figure_csv(figure))))
    assert saved[0] == wanted[0]
    assert [(r[0], float(r[2]), float(r[3])) for r in saved[1:]] == [
        (r[0], float(r[2]), float(r[3])) for r in wanted[1:]
    ]


def test_legend_zoom_hover_and_theme_work(desk: Watched) -> None:
    page = desk.page
    page.locator("#plot-loss").scroll_into_view_if_needed()
    entry = page.locator("#legend-loss button").first
    name = entry.inner_text()
    entry.click()
    assert page.locator(f'#plot-loss .series[data-name="{name}"]').count() == 0
    page.locator("#legend-loss button").first.click()
    assert page.locator(f'#plot-loss .series[data-name="{name}"]').count() == 1
    page.locator("#plot-accuracy").scroll_into_view_if_needed()
    box = page.locator("#plot-accuracy .field").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    tip = page.inner_text("#plot-accuracy .tip")
    assert "epoch" in tip
    assert "validation top-1" in tip
    ticks = "[...document.querySelectorAll('#plot-accuracy .tick.x')].map(e => e.textContent)"
    before = page.evaluate(ticks)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.8 * box["height"], steps=5)
    page.mouse.up()
    zoomed = page.evaluate(ticks)
    assert float(zoomed[0]) > float(before[0])
    page.locator("#legend-accuracy .reset").click()
    assert page.evaluate(ticks) == before
    paint = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paint)
    stroke = "document.querySelector('#plot-accuracy .series path').getAttribute('stroke')"
    line = page.evaluate(stroke)
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(paint) != light
    assert page.get_attribute("#theme", "aria-pressed") == "true"
    assert page.evaluate(stroke) != line
    assert desk.complaints == []


def test_nothing_covers_legends_and_a_finger_reads_values(browser: Browser, folder: Path) -> None:
    with open_page(browser, folder / "report.html", 390, 800) as watched:
        page = watched.page
        hidden = page.evaluate(
            """() => [...document.querySelectorAll('.legend button')].filter(one => {
                one.scrollIntoView({block: 'center'});
                const at = one.getBoundingClientRect();
                const top = document.elementFromPoint(at.x + at.width / 2, at.y + at.height / 2);
                return !one.contains(top);
            }).map(one => one.textContent)"""
        )
        assert hidden == []
        page.locator("#plot-loss").scroll_into_view_if_needed()
        page.evaluate(
            """() => { const svg = document.querySelector('#plot-loss svg.drawing'), at = svg.getBoundingClientRect();
            svg.dispatchEvent(new PointerEvent('pointerdown', {pointerType: 'touch', bubbles: true,
                clientX: at.x + at.width / 2, clientY: at.y + at.height / 2})); }"""
        )
        assert "training" in page.inner_text("#plot-loss .tip")
        assert watched.complaints == []


def test_the_page_follows_the_reader_and_fits_a_phone(browser: Browser, folder: Path) -> None:
    with open_page(browser, folder / "report.html", 360, 740, "dark") as watched:
        page = watched.page
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert overflow(page) <= 0
        wide = page.evaluate(
            "[...document.querySelectorAll('h1, h3, figure, .plot svg.drawing, .tile, button, #torus-drawing')]"
            ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
        )
        assert wide == []
        assert watched.complaints == []


def test_the_animation_plays_stops_steps_and_shows_any_algorithm(desk: Watched) -> None:
    page = desk.page
    page.locator("#figure-torus").scroll_into_view_if_needed()
    assert page.input_value("#torus-algorithm") == "torus"
    assert page.locator("#torus-workers > g").count() == 4
    assert page.locator("#torus-phases li").count() == 3
    assert "simulated" in page.inner_text("#torus-phases")
    wait_until(page, "Number(document.getElementById('torus-drawing').dataset.tick || 0) >= 2")
    assert page.locator("#torus-packets circle").count() == 4
    page.locator("#torus-play").click()
    assert page.inner_text("#torus-play") == "Play"
    for name, num_phases in (("hierarchical", 3), ("two_way_torus", 6), ("halving_doubling", 1), ("exchange", 2)):
        page.select_option("#torus-algorithm", name)
        assert page.locator("#torus-phases li").count() == num_phases
        assert page.locator("#torus-phases li[aria-current=step]").count() >= 1
        steps = int(
            page.evaluate(
                f"megabatchReport.data.torus.algorithms.find(a => a.name === '{name}').phases"
                ".filter(p => p.channel === 0).reduce((sum, p) => sum + p.steps.length, 0)"
            )
        )
        for _ in range(steps - 1):
            page.locator("#torus-step").click()
        assert page.locator("#torus-packets circle").count() >= 1
        page.locator("#torus-step").click()  # round again: everything starts anew
        assert page.locator("#torus-workers .summed").all_text_contents() == ["sum of 1"] * 4
    assert desk.complaints == []


@pytest.mark.parametrize(
    "name", ["torus", "ring", "hierarchical", "two_way_torus", "direct", "exchange", "halving_doubling"]
)
def test_at_the_end_every_worker_holds_the_whole_sum(desk: Watched, name: str) -> None:
    state: list[Any] = desk.page.evaluate("name => megabatchTorus.end(name)", name)
    assert len(state) == 4
    for channels in state:
        assert sum(channel["width"] for channel in channels) == pytest.approx(1.0)
        assert {channel["summed"] for channel in channels} == {4}
        assert not any(channel["waits"] for channel in channels)


def test_a_hostile_run_runs_nothing_and_breaks_nothing(browser: Browser, tmp_path: Path) -> None:
    folder = make_hostile_run(tmp_path / '"><img src=x onerror=alert(1)>')
    write_report([folder], tmp_path / "page.html")
    with open_page(browser, tmp_path / "page.html") as watched:
        page = watched.page
        page.on("dialog", lambda dialog: watched.complaints.append(dialog.message))
        assert page.locator("img").count() == 0
        assert page.locator("body script").count() == 4
        assert page.locator("svg a, svg script, svg image").count() == 0
        assert page.locator(".plot svg.drawing").count() > 0
        assert overflow(page) <= 0
        page.wait_for_timeout(300)
        assert watched.complaints == []


def test_keyboard_and_screen_reader(browser: Browser, folder: Path) -> None:
    with open_page(browser, folder / "report.html") as watched:
        page = watched.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "theme"
        levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(e => Number(e.tagName[1]))")
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))
        nameless = page.evaluate(
            "[...document.querySelectorAll('main button, main select, .plot, #torus-drawing')].filter("
            "e => !(e.textContent.trim() || e.getAttribute('aria-label')"
            " || document.querySelector(`label[for=${e.id}]`))).length"
        )
        assert nameless == 0
        assert page.evaluate("document.documentElement.lang") == "en"
        assert page.locator("figure.card details table caption").count() == 13


def test_a_comparison_aligns_runs_and_lists_what_differs(browser: Browser, tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "small", workers=1, grid="1x1"),
        make_run(tmp_path / "large", workers=4, speed=3.5, seed=2, algorithm="ring"),
    ]
    write_report(folders, tmp_path / "page.html")
    with open_page(browser, tmp_path / "page.html", 420) as watched:
        page = watched.page
        assert page.locator("#legend-loss button").all_text_contents() == ["small", "large"]
        assert page.locator("#plot-efficiency svg.drawing").count() > 0
        text = page.inner_text("#conditions")
        assert "comm.algorithm" in text
        assert "train.seed" in text
        assert overflow(page) <= 0
        assert watched.complaints == []
