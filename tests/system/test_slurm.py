"""A run under a real Slurm: checked by sbatch, told to stop, requeued, preempted by a better job, finished."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from megabatch.launch.script import LaunchRequest, Site, slurm_script
from tests.system.runs import REPOSITORY, SMALL, losses_of, rows_of, train_on_ranks
from tests.system.slurm import Slurm, open_slurm, wait_for

LONG = ("train.epochs=120", "checkpoint.every_epochs=0")


def script(folder: Path, name: str) -> Path:
    settings = tuple(one for one in SMALL if not one.startswith(("train.epochs", "checkpoint."))) + LONG
    request = LaunchRequest(
        "demo", str(folder / name), 1, 2, name, "", settings, python=sys.executable, grace_seconds=60
    )
    extra = ("--exclusive", f"--chdir={REPOSITORY}", f"--output={folder}/{name}-%j.log")
    path = folder / f"{name}.sbatch"
    path.write_text(slurm_script(request, Site("low", extra=extra)))
    return path


def go_on_at_once(slurm: Slurm, job: str) -> None:
    """Slurm lets a requeued job wait for two minutes, counted from its end; a test has no time for that."""

    wait_for(lambda: slurm.state(job) == "PENDING", 90, "the job is queued again")
    for _ in range(6):  # the wait begins anew when the last of the job's processes has ended
        if slurm.state(job) == "PENDING":
            slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if slurm.state(job) != "PENDING":
                return
            time.sleep(0.5)
    raise AssertionError("the job stays in the queue")


def num_rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_stopped_preempted_requeued_and_finished_like_one_that_never_was(tmp_path: Path) -> None:
    with open_slurm() as slurm:
        path, run = script(tmp_path, "run"), tmp_path / "run"
        assert "to start at" in slurm.run("sbatch", "--test-only", str(path))
        job = slurm.submit(str(path))
        log = tmp_path / f"run-{job}.log"
        wait_for(lambda: num_rows(run) > 20, 120, "the first steps")

        slurm.run("scancel", "--batch", "--signal=USR1", job)  # what Slurm does before the time limit
        wait_for(lambda: "stopped with a checkpoint" in log.read_text(), 90, "a checkpoint after the signal")
        first = num_rows(run)
        assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
        go_on_at_once(slurm, job)
        wait_for(lambda: num_rows(run) > first + 20, 120, "steps of the second attempt")

        better = slurm.submit("--partition=high", "--exclusive", "--output=/dev/null", "--wrap", "sleep 2")
        wait_for(lambda: slurm.state(better) == "COMPLETED", 120, "the better job has had its turn")
        second = num_rows(run)
        assert first < second < 990
        go_on_at_once(slurm, job)
        wait_for(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), 240, "the end of the job")
        said = log.read_text()
        assert slurm.state(job) == "COMPLETED", said
        assert "attempt 2" in said
        assert said.count("stopped with a checkpoint") == 2
        assert "the run is finished" in said

    assert [row["step"] for row in rows_of(run)] == list(range(1, 991))
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    # The same steps as a run that nobody ever interrupted.
    train_on_ranks(2, tmp_path / "quiet", *LONG)
    assert losses_of(run) == losses_of(tmp_path / "quiet")
