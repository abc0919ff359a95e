"""The figures hold every trial, and the page is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.config import Config
from megabatch.report.figure import Figure, Missing
from megabatch.tune.figure import by_rate, figures, what_was_saved, write_page
from megabatch.tune.plan import make_plan
from megabatch.tune.results import SearchResult, TrialResult

LEVEL = "optimizer.lr_factor"
TRIALS = [
    TrialResult(0, {LEVEL: 1.0}, "finished", (0.5, 0.7), 1920, 2.0),
    TrialResult(1, {LEVEL: 2.0}, "pruned", (0.4,), 480, 0.5),
    TrialResult(2, {LEVEL: 4.0}, "diverged", (), 40, 0.1),
]


def test_every_trial_is_a_point(tiny: Config) -> None:
    plan = make_plan(tiny, search=[f"{LEVEL}=0.25:8:log"], rungs=2)
    figure = by_rate(SearchResult(plan, TRIALS))
    assert isinstance(figure, Figure)
    short, whole, lost = figure.series
    assert (short.x, short.y) == ((1.0, 2.0), (0.5, 0.4))
    assert (whole.x, whole.y) == ((1.0,), (0.7,))
    assert (lost.x, lost.y) == ((4.0,), (0.4,))
    assert figure.x.kind == "log"
    assert isinstance(by_rate(SearchResult(plan, TRIALS[2:])), Missing)


def test_what_was_saved_adds_up(tiny: Config) -> None:
    plan = make_plan(tiny, search=[f"{LEVEL}=0.25:8:log"], rungs=2)
    figure = what_was_saved(SearchResult(plan, TRIALS))
    assert isinstance(figure, Figure)
    seen, saved = figure.series
    assert seen.y == (1920, 480, 40)
    assert saved.y == (0, 960, 1400)  # of 8 * 180 images
    alone = make_plan(tiny, search=[f"{LEVEL}=0.25:8:log"], rungs=1)
    assert isinstance(what_was_saved(SearchResult(alone, TRIALS)), Missing)


def test_the_page_escapes_and_says_what_is_missing(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SearchResult, "statements", ["so & so"])
    plan = make_plan(tiny, search=[f"{LEVEL}=0.25:8:log"], rungs=2)
    drawn = write_page(tmp_path / "report.html", "<b>", SearchResult(plan, TRIALS))
    page = (tmp_path / "report.html").read_text()
    assert [one.key for one in drawn] == ["tune_rate", "tune_saved"]
    assert len(figures(SearchResult(plan, TRIALS))) == 3
    for text in ("so &amp; so", "1 figure is not here", "Made by <code>megabatch tune</code>", "plot-tune_saved"):
        assert text in page
    assert "Tuning <b>" not in page
