"""The page: claim, conditions, figures, how to repeat it. One file, no network, same input same bytes.

The scripts are the drawing library's bundle, read from the installed `plotly` package, and two small ones of our own;
a Content-Security-Policy in the page allows these three by their hashes and nothing else, so that even a mistake in
escaping could not run a script or load anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path
from typing import Any

from megabatch.errors import ConfigError
from megabatch.report.claim import headline, state
from megabatch.report.figure import COLORS, Figure, Missing, figure_as_data
from megabatch.report.figures.network import NetworkTimes
from megabatch.report.gather import all_figures, network_times
from megabatch.report.markup import chip, escape, json_for_script, script_hash
from megabatch.report.run import Run
from megabatch.report.sections import claim_section, conditions_section, figures_section, repeat_section
from megabatch.report.torus import torus_as_data

__all__ = ["Page", "build_page", "html_of"]

_THEME = 'document.documentElement.dataset.theme=matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light";'


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
    """Everything the page shows of these runs."""
    found = all_figures(runs, times)
    figures = [one for one in found if isinstance(one, Figure)]
    missing = [one for one in found if isinstance(one, Missing)]
    torus = torus_as_data(runs[0], network_times(runs, times)) if len(runs) == 1 else None
    parts = {
        "claim": claim_section(runs),
        "conditions": conditions_section(runs),
        "figures": figures_section(figures, missing, torus),
        "repeat": repeat_section(runs),
    }
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
    return Page(headline(runs), parts, data)


def html_of(page: Page, runs: Sequence[Run]) -> str:
    """The whole file."""
    scripts = [_THEME, _plotly(), _asset("page.js"), _asset("torus.js")]
    policy = (
        f"default-src 'none'; script-src {' '.join(script_hash(source) for source in scripts)}; "
        f"style-src 'unsafe-inline'; img-src data: blob:; connect-src {_connect(page)}; "
        "base-uri 'none'; form-action 'none'"
    )
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    word, kind = state(runs[0]) if len(runs) == 1 else ("comparison", "")
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
        "<footer>Made by <code>megabatch report</code>. Numbers are tagged measured, simulated or quoted.</footer>\n"
        f'<script type="application/json" id="report-data">{json_for_script(page.data)}</script>\n'
    )
    order = [_asset("torus.js"), _plotly(), _asset("page.js")]
    return head + body + "".join(f"<script>{source}</script>\n" for source in order) + "</body>\n</html>\n"


def _connect(page: Page) -> str:
    return "'self'" if page.data["live"] else "'none'"


def _asset(name: str) -> str:
    return resources.files("megabatch.report").joinpath("assets", name).read_text(encoding="utf-8")


def _plotly() -> str:
    """The drawing library, from the installed package; found without importing it, which would take a second."""
    spec = util.find_spec("plotly")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for place in places:
        bundle = place / "package_data" / "plotly.min.js"
        if bundle.is_file():
            return bundle.read_text(encoding="utf-8")
    raise ConfigError("the page needs the drawing library of 'plotly', which is not installed; pip install plotly")
