"""Two hosts with one journal: what the check says of results that are known, and the whole thing once."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.netlab import unavailable_reason
from benchmarks.tune_hosts import Killed, begun_trials, ended_runs, measure, problems_of, saved_steps
from tests.system.runs import REPOSITORY

FIRST, SECOND = [(0, "4"), (0, "12"), (2, "4")], [(1, "4")]


def rows(*outcomes: str) -> list[dict[str, Any]]:
    return [{"trial": number, "outcome": outcome} for number, outcome in enumerate(outcomes)]


GOOD = rows("finished", "pruned", "diverged")


def test_a_search_without_fault_has_no_problems() -> None:
    assert problems_of(3, GOOD, [FIRST, SECOND], begun=3, killed=2) == []


@pytest.mark.parametrize(
    ("found", "ended", "begun", "killed", "said"),
    [
        (GOOD[:2], [FIRST, SECOND], 3, 2, r"numbers: the trials are \[0, 1\], 3 were begun, 3 were asked for"),
        (GOOD, [FIRST, SECOND], 4, 2, r"numbers: .* 4 were begun"),
        (GOOD, [FIRST, [*SECOND, (2, "4")]], 3, 2, r"runs: ended more than once: \[\(2, '4'\)\]"),
        (GOOD, [FIRST[:2], SECOND], 3, 0, r"runs: no host ended one of trials \[2\]"),
        (GOOD, [[*FIRST, *SECOND], []], 3, 2, r"shared: a host ended no run"),
        (rows("finished", "pruned", "under way"), [FIRST, SECOND], 3, 2, r"continued: trials \[2\] have not ended"),
        (GOOD, [FIRST, SECOND], 3, 1, r"continued: trial 1 was not ended by the host that was left"),
    ],
)
def test_every_fault_is_seen(
    found: list[dict[str, Any]], ended: list[list[tuple[int, str]]], begun: int, killed: int, said: str
) -> None:
    [problem] = problems_of(3, found, ended, begun, killed)
    assert re.match(said, problem), problem


def test_what_a_host_said_is_read() -> None:
    told = (
        "folder   x\n"
        "trial 0 of 0 to 2: top1 19.00% after 4 epochs, goes on (lr_factor 1; 0 going on)\n"
        "trial 2 of 0 to 2: diverged (lr_factor 9; 0 going on)\n"
        "| trial | lr_factor |\n"
    )
    assert ended_runs(told) == [(0, "4"), (2, "diverged")]


def test_a_run_that_was_begun_again_is_told_from_one_that_went_on(tmp_path: Path) -> None:
    run = tmp_path / "trials" / "0007" / "rung-1"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("step-00000002.pt", "step-00000010.pt", ".step-00000030.pt.part"):
        (run / "checkpoints" / name).touch()
    assert saved_steps(run) == 10
    killed = Killed(run, [b"one", b"two"])
    assert killed.trial == 7
    (run / "metrics.jsonl").write_bytes(b"one\ntwo\nthree\n")
    assert not killed.went_on()  # it has not ended
    (run / "summary.json").touch()
    assert killed.went_on()
    (run / "metrics.jsonl").write_bytes(b"one\n2\nthree\n")
    assert not killed.went_on()


def test_trials_are_counted_in_a_journal_of_optuna(tmp_path: Path) -> None:
    """If a new Optuna numbered its operations otherwise, the count would be wrong."""
    optuna = pytest.importorskip("optuna", reason="the extra [tune] is not installed")
    path = tmp_path / "journal.log"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    study = optuna.create_study(storage=storage)
    study.enqueue_trial({"x": 0.5})
    for _ in range(3):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        study.tell(trial, 1.0)
    assert begun_trials(path) == 3


def need_laboratory() -> None:
    """Without root the test is skipped; where only a tool is missing it fails in CI, which must have it."""
    reason = unavailable_reason()
    if reason is None and not Path("/dev/net/tun").exists():
        reason = "no /dev/net/tun here"
    if reason is not None:
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)
    pytest.importorskip("optuna", reason="the extra [tune] is not installed")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(1500)  # a dozen trainings start one after another
def test_two_hosts_share_a_journal_and_one_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_laboratory()
    monkeypatch.chdir(REPOSITORY)
    found = measure(5, 9.0, tmp_path)
    assert found["problems"] == []
    assert found["killed_in_trial"] in range(5)
    assert min(found["runs_ended_by_host"]) >= 1
