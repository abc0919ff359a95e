"""The page: claim, conditions, figures, how to repeat it. One file, no network, same input same bytes.

Its scripts are three small files in `assets`: figures, the animated grid, the page. A Content-Security-Policy in the
page allows them by their hashes and nothing else, so that even a mistake in escaping could not run a script or load
anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from rich.progress import track

from megabatch.errors import ConfigError
from megabatch.files import write_atomically
from megabatch.report import curves, sections, speed
from megabatch.report.claim import headline, status
from megabatch.report.classes import classes_section
from megabatch.report.drawing import write_figures
from megabatch.report.figure import COLORS, Constant, Figure, Missing, figure_as_data
from megabatch.report.membership import membership
from megabatch.report.network import NetworkTimes, all_reduce, network_times, torus_as_data
from megabatch.report.plan_compare import predicted
from megabatch.report.run import PAGE_FILE, Run, read_runs
from megabatch.report.sections import chip

_THEME = 'document.documentElement.dataset.theme=matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light";'


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write the page of one or more run folders."""
    runs = read_runs(folders)
    write_atomically(output, html_of(build_page(runs), runs))


def write_report_files(
    folders: Sequence[Path], output: Path | None, figures: Path | None, network: Path | None, say: Callable[[str], None]
) -> None:
    """Write the page, and the figures where they are wanted; say where they are."""
    runs = read_runs(folders)
    times = network_times(runs, network)
    page = output or (folders[0] / PAGE_FILE if len(folders) == 1 else Path("comparison.html"))
    if page.is_dir() or not page.absolute().parent.is_dir():
        raise ConfigError(f"--output '{page}' is not a file in an existing folder; give one, for example report.html")
    write_atomically(page, html_of(build_page(runs, times), runs))
    say(f"page           {page}")
    if figures is not None:
        found = [one for one in all_figures(runs, times) if isinstance(one, Figure)]
        files = write_figures(track(found, "figures", transient=True), figures)
        say(f"figures        {len(files)} files in {figures}")


def all_figures(runs: Sequence[Run], times: NetworkTimes | None = None) -> list[Figure | Constant | Missing]:
    """Every figure in its order, a sentence in its place, or why it is not there."""
    several = (curves.accuracy_by_time, curves.accuracy, curves.accuracy_by_step)
    before = (
        *(several if len(runs) > 1 else (curves.accuracy,)),
        *(curves.loss, curves.lr, curves.global_batch_size, curves.momentum, curves.gradient_norm),
        *(curves.images_per_second, speed.step_split, speed.ranks, membership),
    )
    after = (speed.efficiency, predicted, curves.noise_scale, curves.ensemble)
    network = all_reduce(times or network_times(runs))
    return [*(make(runs) for make in before), network, *(make(runs) for make in after)]


@dataclass(frozen=True)
class Page:
    """The page before it is one file: parts of HTML by element id, and the data its scripts draw."""

    title: str
    parts: dict[str, str]
    data: dict[str, Any]

    @property
    def version(self) -> str:
        return str(self.data["version"])


def build_page(runs: Sequence[Run], times: NetworkTimes | None = None, *, live: bool = False) -> Page:
    """Everything the page shows of these runs; `times` are those of the run folders unless they are given."""
    times = times or network_times(runs)
    found = all_figures(runs, times)
    figures = [one for one in found if isinstance(one, Figure)]
    constant = [one for one in found if isinstance(one, Constant)]
    missing = [one for one in found if isinstance(one, Missing)]
    torus = torus_as_data(runs[0], times) if len(runs) == 1 else None
    parts = {
        "claim": sections.claim_section(runs),
        "conditions": sections.conditions_section(runs),
        "figures": sections.figures_section(figures, missing, torus, constant),
        "classes": classes_section(runs),
        "repeat": sections.repeat_section(runs),
    }
    if not parts["classes"]:
        del parts["classes"]
    return page_of(headline(runs), parts, figures, torus, live=live)


def page_of(
    title: str,
    parts: dict[str, str],
    figures: Sequence[Figure],
    torus: dict[str, Any] | None = None,
    *,
    live: bool = False,
) -> Page:
    """Parts of HTML and the figures in them as a page."""
    data: dict[str, Any] = {
        "figures": [figure_as_data(figure) for figure in figures],
        "colors": {name: list(pair) for name, pair in COLORS.items()},
        "torus": torus,
        "live": live,
        # What the list of figures looks like: a live page keeps its zooms as long as this stays the same.
        "layout": " ".join(figure.key for figure in figures),
    }
    text = json.dumps([parts, data], sort_keys=True, allow_nan=False)
    data["version"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Page(title, parts, data)


def summary_page(
    title: str,
    sentences: Sequence[str],
    found: Sequence[Figure | Missing],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    name: str,
    word: str,
    made_by: str,
) -> str:
    """The whole file of a search or a study: what it says, its figures, its tables by their captions."""
    drawn = [one for one in found if isinstance(one, Figure)]
    missing = [one for one in found if isinstance(one, Missing)]
    said = "".join(f"<li>{escape(one)}</li>" for one in sentences)
    shown = "".join(
        sections.html_table(caption, list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])
        for caption, rows in tables.items()
    )
    parts = {
        "claim": f'<h1 id="claim-title">{escape(title)}</h1><ul>{said}</ul>',
        "figures": sections.figures_section(drawn, missing, None),
        "tables": f'<h2 id="tables-title">Tables</h2>{shown}',
    }
    return whole_file(page_of(title, parts, drawn), name, word, made_by=made_by)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def html_of(page: Page, runs: Sequence[Run]) -> str:
    """The whole file, of runs."""
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return whole_file(page, name, *(status(runs[0]) if len(runs) == 1 else ("comparison", "")))


def whole_file(page: Page, name: str, word: str, kind: str = "", made_by: str = "megabatch report") -> str:
    """The whole file; `word` is the label on top, `kind` its color."""
    scripts = [_asset(name) for name in ("torus.js", "plot.js", "page.js")]
    allowed = " ".join(script_hash(source) for source in (_THEME, *scripts))
    connect = "'self'" if page.data["live"] else "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    live = '<span id="live" class="chip good" role="status">live</span>' if page.data["live"] else ""
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(name)} - {escape(page.title)}</title>\n"
        f"<script>{_THEME}</script>\n<style>\n{_asset('page.css')}</style>\n</head>\n"
    )
    sections = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title">\n{part}\n</section>\n' for key, part in page.parts.items()
    )
    body = (
        '<body>\n<a class="skip" href="#main">Skip to the report</a>\n'
        f'<header><span class="brand">megabatch <span>report</span></span>{chip(word, kind)}{live}'
        '<span class="space"></span><button id="theme" type="button" aria-pressed="false">Dark</button></header>\n'
        f'<main id="main">\n{sections}</main>\n'
        f"<footer>Made by <code>{escape(made_by)}</code>. Numbers are tagged measured, simulated or quoted.</footer>\n"
        f'<script type="application/json" id="report-data">{json_for_script(page.data)}</script>\n'
    )
    return head + body + "".join(f"<script>{source}</script>\n" for source in scripts) + "</body>\n</html>\n"


def _asset(name: str) -> str:
    return resources.files("megabatch.report").joinpath("assets", name).read_text(encoding="utf-8")


def json_for_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever its strings say."""
    dumped = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_hash(source: str) -> str:
    """The Content-Security-Policy source that allows exactly this inline script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
