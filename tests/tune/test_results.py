"""What trials came to: the best, the good range, importance, sentences, one line when all diverged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megabatch.config import Config
from megabatch.tune.plan import TunePlan, make_plan
from megabatch.tune.results import Outcome, SearchResult, TrialResult

LEVEL, SMOOTHING = "optimizer.lr_factor", "train.label_smoothing"


@pytest.fixture
def plan(tiny: Config) -> TunePlan:
    return make_plan(tiny, search=[f"{LEVEL}=0.25:4:log", f"{SMOOTHING}=0:0.2"], rungs=2)


def trial(
    number: int, level: float, *numbers: float, outcome: Outcome = "pruned", smoothing: float = 0.1
) -> TrialResult:
    return TrialResult(number, {LEVEL: level, SMOOTHING: smoothing}, outcome, numbers, 480, 1.5)


def test_the_best_is_one_of_the_longest_runs(plan: TunePlan) -> None:
    trials = [trial(0, 1, 0.5, 0.7, outcome="finished"), trial(1, 2, 0.9), trial(2, 2, 0.4, 0.8, outcome="finished")]
    best, lowest = SearchResult(plan, trials).best, SearchResult(replace(plan, metric="val_loss"), trials).best
    assert best is not None
    assert lowest is not None
    assert (best.number, lowest.number) == (2, 0)
    assert SearchResult(plan, [trial(0, 1, outcome="diverged")]).best is None


def test_the_good_range(plan: TunePlan) -> None:
    trials = [trial(0, 0.5, 0.791), trial(1, 1, 0.8), trial(2, 2, 0.795), trial(3, 4, 0.7), trial(4, 0.3)]
    level, smoothing = SearchResult(plan, trials).good_ranges
    assert (level.low, level.high, level.num_trials) == (0.5, 2, 3)
    assert level.text == "optimizer.lr_factor 0.5 to 2, a factor of 4"
    assert (smoothing.low, smoothing.high) == (0.1, 0.1)
    assert SearchResult(plan, []).good_ranges == []


def test_the_level_is_what_matters(plan: TunePlan) -> None:
    """By construction: the number depends on the level alone, smoothing is noise that goes round in fives."""
    trials = [trial(i, 0.25 * 16 ** (i / 19), 0.5 + 0.02 * i, smoothing=0.04 * (i % 5)) for i in range(20)]
    shares = SearchResult(plan, trials).importance
    assert shares[LEVEL] > 0.75
    assert sum(shares.values()) == pytest.approx(1.0)
    assert SearchResult(plan, trials[:3]).importance == {}
    assert SearchResult(plan, [trial(i, 1, 0.5) for i in range(9)]).importance == {}


def test_what_is_said(plan: TunePlan) -> None:
    trials = [trial(0, 1, 0.5, 0.6, outcome="finished"), trial(1, 3.9, 0.8, 0.9, outcome="finished"), trial(2, 3, 0.7)]
    said = " ".join(SearchResult(plan, trials).statements)
    assert "3 trials: 2 finished, 1 pruned, 0 diverged; 1,440 images, 4.5 s of training." in said
    assert "would have taken 4,320 images: 33% were used" in said  # 3 * 8 epochs of 180 images
    assert "Best: trial 1, top1 90.00 % of 20 held-out images, 8 epochs." in said
    assert "The recipe as it was (trial 0): 60.00 %." in said
    assert "optimizer.lr_factor 3.9 lies at the upper end of 0.25 to 4: extend that end." in said


def test_all_diverged(plan: TunePlan) -> None:
    lost = [trial(0, 1, outcome="diverged"), trial(1, 3, outcome="diverged"), trial(2, 2, outcome="under way")]
    line = SearchResult(plan, lost).all_diverged
    assert "all 2 trials diverged, with optimizer.lr_factor from 1 to 3" in line
    assert "--search optimizer.lr_factor=0.0025:0.25:log" in line
    assert SearchResult(plan, [*lost, trial(3, 1, 0.5)]).all_diverged == ""
    assert SearchResult(plan, []).all_diverged == ""


def test_tables(plan: TunePlan) -> None:
    trials = [trial(0, 1, outcome="diverged"), trial(1, 2, 0.5, 0.75, outcome="finished")]
    first, second = SearchResult(plan, trials).rows
    assert (first["outcome"], first["top1_at_8_epochs"], second["top1_at_8_epochs"]) == ("diverged", None, 0.75)
    lines = SearchResult(plan, trials).table.splitlines()
    assert lines[2] == "| 1 | 2 | 0.1 | 50.00 | 75.00 | finished | 480 |"
    assert lines[3].startswith("| 0 | 1 | 0.1 |  |  | diverged")
