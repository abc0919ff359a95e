"""The journal: one owner per trial, interrupted ones taken over, another plan refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.trial import TrialState

from megabatch.config import Config
from megabatch.errors import CheckpointError
from megabatch.recipes import load_config
from megabatch.tune.journal import JOURNAL, Journal
from megabatch.tune.plan import make_plan
from tests.tune.conftest import TINY

SEARCH = ["optimizer.lr_factor=0.25:4:log", "train.label_smoothing=0:0.2"]


@pytest.fixture
def journal(tmp_path: Path, tiny: Config) -> Journal:
    return Journal(tmp_path, make_plan(tiny, search=SEARCH, rungs=2))


def test_the_first_trial_is_the_recipe_and_quasi_random_ones_fill_the_range(journal: Journal) -> None:
    trials = [journal.next_trial(True, startup=9) for _ in range(9)]
    values = [one.values for one in trials if one is not None]
    assert values[0] == {"optimizer.lr_factor": 1.0, "train.label_smoothing": 0.1}
    # Eight points of a Sobol sequence: two in each quarter of the range, which independent draws do rarely.
    quarters = [int(one["train.label_smoothing"] / 0.05) for one in values[1:]]
    assert sorted(quarters) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(0.25 <= one["optimizer.lr_factor"] <= 4 for one in values)


def test_a_trial_has_one_owner_and_is_taken_over_when_that_is_gone(journal: Journal, tmp_path: Path) -> None:
    mine = journal.next_trial(True, startup=4)
    assert mine is not None
    other_host = Journal(tmp_path, journal.plan)
    assert other_host.next_trial(False, startup=4) is None  # it is being worked on
    second = other_host.next_trial(True, startup=4)
    assert second is not None
    assert second.number == 1
    assert second.values != mine.values
    assert journal.report(mine, 0.5, 100, 1.5)
    mine.close()  # as the end of its process does
    taken = other_host.next_trial(False, startup=4)
    assert taken is not None
    assert (taken.number, taken.values, taken.rung) == (0, mine.values, 1)
    assert not other_host.report(taken, 0.6, 300, 4.5)
    ended = journal.trials()[0]
    assert (ended.state, ended.value) == (TrialState.COMPLETE, 0.6)
    assert ended.user_attrs == {"cost-0": [100, 1.5], "cost-1": [300, 4.5]}


def test_a_trial_interrupted_between_its_last_number_and_its_end_is_ended(journal: Journal) -> None:
    held = journal.next_trial(True, startup=4)
    assert held is not None
    held.trial.report(0.3, 1)
    held.trial.report(0.4, 3)
    held.close()
    assert journal.next_trial(False, startup=4) is None
    assert (journal.trials()[0].state, journal.trials()[0].value) == (TrialState.COMPLETE, 0.4)


def test_one_in_three_goes_on(journal: Journal) -> None:
    went_on = 0
    for number in range(9):
        held = journal.next_trial(True, startup=20)
        assert held is not None
        if journal.report(held, 0.5 - 0.01 * number, 1, 1.0):  # each is worse than all before it
            went_on += 1
            journal.report(held, 0.6, 3, 3.0)
    assert went_on == 1
    assert [one.state for one in journal.trials()] == [TrialState.COMPLETE] + [TrialState.PRUNED] * 8


def test_a_diverged_trial_is_a_result(journal: Journal) -> None:
    held = journal.next_trial(True, startup=4)
    assert held is not None
    journal.diverged(held, 40, 0.5)
    (trial,) = journal.trials()
    assert trial.state == TrialState.PRUNED
    assert trial.user_attrs == {"cost-0": [40, 0.5], "diverged_at_rung": 0}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (("optimizer.nesterov=false",), {}, "another recipe: its optimizer.nesterov is True, given False"),
        ((), {"search": ["optimizer.lr_factor=0.25:8:log"]}, "other ranges: they differ in"),
        ((), {"epochs": 4.0}, "another --epochs"),
    ],
)
def test_the_journal_of_another_plan_is_refused(
    journal: Journal, tmp_path: Path, changes: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    before = (tmp_path / JOURNAL).read_bytes()
    chosen: dict[str, object] = {"search": SEARCH, "rungs": 2, **options}
    plan = make_plan(load_config("demo", [*TINY, *changes]), **chosen)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message):
        Journal(tmp_path, plan)
    assert journal.plan.digest != plan.digest
    assert (tmp_path / JOURNAL).read_bytes().startswith(before)  # Optuna notes that somebody came; nothing is lost


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, tiny: Config) -> None:
    (tmp_path / JOURNAL).write_text("[1, 2]\nnothing\n\n")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Journal(tmp_path, make_plan(tiny))
