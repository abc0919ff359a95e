"""Runs of a study as processes: side by side, skipped when finished, resumed when stopped, apart when failing."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from megabatch.errors import CheckpointError, TrainingError
from megabatch.study import run as running
from megabatch.study.plan import Study, StudyRun, from_file, from_grid
from megabatch.study.results import collect, number_of_run
from megabatch.study.run import Outcome, evaluate_ensembles, free_cores, is_finished, run_all

pytestmark = pytest.mark.usefixtures("quick_trainer")


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().splitlines()


def test_all_runs_finish_and_are_not_run_again(study_file: Path, tmp_path: Path) -> None:
    runs, heard = from_file(study_file).runs(), []
    outcomes = run_all(runs, tmp_path / "out", 2, lambda outcome, going: heard.append((outcome.run.key, going)))
    assert {outcome.run.key for outcome in outcomes} == {run.key for run in runs}
    assert {outcome.state for outcome in outcomes} == {"finished"}
    assert len(heard) == 5
    assert all(going < 2 for _, going in heard)
    # One worker alone, in our own process group: what pauses the study pauses its runs.
    assert starts(tmp_path / "out" / runs[0].key) == [f" 1 {os.getpgrp()}"]
    assert run_all(runs, tmp_path / "out", 2) == []


def test_a_failing_run_is_told_and_does_not_touch_the_others(tmp_path: Path) -> None:
    runs = from_grid("demo", ["train.label_smoothing=0.0,0.1,0.4"], 1).runs()
    outcomes = {outcome.run.key: outcome for outcome in run_all(runs, tmp_path, 3)}
    assert sorted(outcome.state for outcome in outcomes.values()) == ["failed", "finished", "finished"]
    assert outcomes[runs[1].key].reason == "megabatch: no luck"
    # Started again it goes on with that one alone.
    again = run_all(runs, tmp_path, 3)
    assert [outcome.run.key for outcome in again] == [runs[1].key]
    assert starts(tmp_path / runs[1].key)[1].startswith("--resume")


def interrupted(
    runs: list[StudyRun], output: Path, num_jobs: int, signals: int, wait_for: list[StudyRun]
) -> list[Outcome]:
    """Run until `wait_for` are under way, then send this process the signal so many times."""

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not all((output / run.key / "waiting").exists() for run in wait_for):
            time.sleep(0.01)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        return run_all(runs, output, num_jobs)
    finally:
        thread.join()


def test_ctrl_c_stops_what_goes_on_starts_nothing_new_and_can_be_resumed(tmp_path: Path) -> None:
    runs = from_grid("demo", ["train.label_smoothing=0.2,0.4"], 2).runs()
    outcomes = interrupted(runs, tmp_path, 2, 1, runs[:2])
    assert [outcome.state for outcome in outcomes] == ["stopped", "stopped"]
    assert not (tmp_path / runs[2].key).exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    rest = run_all(runs, tmp_path, 2)
    assert {outcome.state for outcome in rest} == {"finished"}
    assert len(rest) == 4
    assert [line.split()[0] for line in starts(tmp_path / runs[0].key)] == ["1", "--resume"]


def test_a_second_ctrl_c_ends_runs_that_do_not_listen(tmp_path: Path) -> None:
    runs = from_grid("demo", ["train.label_smoothing=0.3"], 1).runs()
    (outcome,) = interrupted(runs, tmp_path, 1, 2, runs)
    assert (outcome.state, outcome.reason) == ("failed", "SIGKILL")


@pytest.mark.parametrize("change", ["train.epochs=9", "optimizer.lr=0.7", "train.max_steps=3"])
def test_an_arm_that_has_changed_is_refused(change: str, tmp_path: Path) -> None:
    """Also by what `train --resume` lets change: a result must not stand for settings it was not made with."""
    run_all(from_grid("demo", ["train.global_batch_size=64"], 1).runs(), tmp_path, 1)
    (changed,) = from_grid("demo", ["train.global_batch_size=64"], 1, [change]).runs()
    key = change.partition("=")[0]
    with pytest.raises(CheckpointError, match=rf"arm 'train.global_batch_size=64' has changed since it was run.*{key}"):
        is_finished(tmp_path / changed.key, changed)


def test_free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    for load, free in ((0.1, 8), (3.4, 5), (70.0, 1)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert free_cores() == free


EVALUATOR = """
import json, pathlib, sys
verb, folder, *options = sys.argv[1:]
assert (verb, options) == ("evaluate", ["--ensemble", "--json"])
top1 = json.loads((pathlib.Path(folder) / "summary.json").read_text())["top1"]
if top1 > 0.9:
    sys.exit("megabatch: no members")
with open(pathlib.Path(folder) / "evaluations", "a") as file:
    print("once", file=file)
print("a line of progress")
print(json.dumps({"ensemble": {"top1": top1 + 0.02}, "weight_average": {"top1": top1 - 0.01}, "members": []}))
"""


@pytest.fixture
def study(study_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    script = tmp_path / "evaluator.py"
    script.write_text(EVALUATOR)
    monkeypatch.setattr(running, "COMMAND", (sys.executable, "-S", str(script)))
    study_file.write_text(study_file.read_text().replace('"ensemble_top1"', '"ensemble.top1"'))
    return from_file(study_file)


def write_run(folder: Path, top1: float, status: str = "finished") -> None:
    folder.mkdir(parents=True)
    summary = {"status": status, "top1": top1, "steps": 1, "epoch": 1.0, "training_seconds": 1.0}
    (folder / "summary.json").write_text(json.dumps(summary | {"workers": 1, "skipped_steps": 0}))


def test_each_finished_run_is_evaluated_once(study: Study, tmp_path: Path) -> None:
    write_run(tmp_path / "small" / "seed-0", 0.5)
    write_run(tmp_path / "large-2x" / "seed-0", 0.5)
    write_run(tmp_path / "large-2x" / "seed-1", 0.6, status="stopped")
    for _ in range(2):
        evaluate_ensembles(study, tmp_path)
    assert (tmp_path / "large-2x" / "seed-0" / "evaluations").read_text() == "once\n"
    assert not (tmp_path / "small" / "seed-0" / "ensemble.json").exists()  # no arm asks for it
    assert not (tmp_path / "large-2x" / "seed-1" / "ensemble.json").exists()
    by_name = {result.arm.name: result.spread.mean for result in collect(study, tmp_path)}
    assert by_name["large 2x, ensemble"] == pytest.approx(52.0)
    assert by_name["large 2x"] == pytest.approx(50.0)
    assert number_of_run(tmp_path / "large-2x" / "seed-0", "weight_average.top1") == pytest.approx(0.49)


def test_an_evaluation_that_fails_is_told(study: Study, tmp_path: Path) -> None:
    write_run(tmp_path / "large-2x" / "seed-0", 0.95)
    with pytest.raises(TrainingError, match=r"seed-0' could not be evaluated: megabatch: no members"):
        evaluate_ensembles(study, tmp_path)
