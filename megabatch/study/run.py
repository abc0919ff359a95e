"""Runs a study: every (arm, seed) as a training process of its own, one core each, several side by side.

Each process is `megabatch train` joined as the only worker of its world, so there is no launcher in between: it starts
sooner, stays in the study's process group (what stops or pauses the study stops and pauses its runs) and leaves an
ordinary run folder. The folders are the whole state of a study: finished runs are skipped, interrupted ones resumed, a
failed one is reported and does not touch the others. One whose gradients were no longer finite is a result.

An arm whose metric is `ensemble.top1` or `weight_average.top1` looks at `ensemble.json` in its run folders instead of
`summary.json`: what `megabatch evaluate --ensemble` found, measured once per run.

    OUTPUT/ARM/seed-0/          run folders
    OUTPUT/logs/                what each run said, and the settings it was given
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from megabatch.config import Config
from megabatch.errors import CheckpointError, MegabatchError, TrainingError
from megabatch.files import write_atomically, write_json
from megabatch.machine import usable_cores
from megabatch.report.metrics_log import read_metrics
from megabatch.report.run import CONFIG_FILE, ENSEMBLE_FILE, METRICS_FILE, SUMMARY_FILE, read_json
from megabatch.study.plan import Study, StudyRun
from megabatch.train.run_dir import check_output
from megabatch.workers.stop import handling
from megabatch.workers.world import LAUNCHED_VARIABLE

State = Literal["finished", "diverged", "failed", "stopped"]
COMMAND = (sys.executable, "-m", "megabatch")
POLL_SECONDS = 0.2
_EVALUATION_SECONDS = 1800.0
_PATIENCE_SECONDS = 300.0  # for runs that were asked to stop: one step can be long

# A world of one worker; port 0 lets the system choose, nobody else has to find it.
_ONE_WORKER = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "OMP_NUM_THREADS": "1",
    LAUNCHED_VARIABLE: str(os.getpid()),  # the run ends when the study is killed
}


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `reason` is the last line a failed one said."""

    run: StudyRun
    state: State
    seconds: float
    reason: str = ""


@dataclass
class _Going:
    run: StudyRun
    process: subprocess.Popen[bytes]
    began: float


def free_cores() -> int:
    """Cores that nobody uses at the moment, at least one."""
    return max(1, usable_cores() - round(os.getloadavg()[0]))


def is_finished(folder: Path, run: StudyRun) -> bool:
    """Whether this very run has ended well; CheckpointError when the folder holds one with other settings."""
    try:
        check_output(folder, run.config, resume=True, same_result=True)
    except CheckpointError as error:
        raise CheckpointError(f"arm '{run.arm}' has changed since it was run: {error}") from None
    return _status(folder) == "finished"


@dataclass(frozen=True)
class Divergence:
    """Where a run ended because its gradients were not finite."""

    steps: int
    samples: int
    epoch: float
    skipped_steps: int
    wall_seconds: float

    @property
    def summary(self) -> dict[str, Any]:
        """What a run folder's `summary.json` says of a finished run."""
        return {**vars(self), "training_seconds": self.wall_seconds, "workers": 1}


def divergence(folder: Path, config: Config) -> Divergence | None:
    """How a run diverged; None when it ended otherwise, or has not ended."""
    path = folder / METRICS_FILE
    rows = list(read_metrics(path)) if path.is_file() else []
    skipped = 0
    for row in reversed(rows):
        if row.get("applied"):
            break
        skipped += 1
    if skipped <= config.train.max_skipped_steps:
        return None
    last = rows[-1]
    return Divergence(
        int(last["step"]), int(last["samples"]), float(last.get("epoch", 0.0)), skipped, float(last["wall_seconds"])
    )


def has_result(folder: Path, run: StudyRun) -> bool:
    """Whether nothing is left to run: it has finished, or diverged."""
    return is_finished(folder, run) or divergence(folder, run.config) is not None


def _status(folder: Path) -> str:
    """What the run says of its end; nothing before that."""
    summary = folder / SUMMARY_FILE
    return str(read_json(summary)["status"]) if summary.is_file() else ""


def run_all(
    runs: Sequence[StudyRun],
    output: Path,
    num_jobs: int,
    tell: Callable[[Outcome, int], None] = lambda outcome, going: None,
) -> list[Outcome]:
    """Run what is not finished yet, `num_jobs` at a time; `tell` hears of each end and how many still go on.

    After Ctrl-C or SIGTERM no run is started, those under way write a checkpoint, and the list ends with them.
    """
    waiting = [run for run in runs if not has_result(output / run.key, run)]
    outcomes: list[Outcome] = []

    def note(outcome: Outcome, going: int) -> None:
        outcomes.append(outcome)
        tell(outcome, going)

    run_side_by_side(lambda: waiting.pop(0) if waiting else None, output, num_jobs, note)
    return outcomes


def run_side_by_side(
    next_run: Callable[[], StudyRun | None], output: Path, num_jobs: int, tell: Callable[[Outcome, int], None]
) -> bool:
    """Run what `next_run` gives, `num_jobs` at a time; True when it was stopped by Ctrl-C or SIGTERM.

    `next_run` is asked whenever a place is free; None means that there is nothing to start now. It is over when nothing
    goes on and there is nothing to start. What `tell` or `next_run` raise ends the runs under way; they can be resumed.
    """
    (output / "logs").mkdir(parents=True, exist_ok=True)
    going: list[_Going] = []
    stop = _StopRequests()
    with handling((signal.SIGINT, signal.SIGTERM), stop.note):
        try:
            while True:
                while len(going) < num_jobs and not stop.count and (run := next_run()) is not None:
                    going.append(_Going(run, _start(run, output), time.monotonic()))
                if not going:
                    return bool(stop.count)
                stop.pass_on(going)
                for one in [one for one in going if one.process.poll() is not None]:
                    going.remove(one)
                    tell(_outcome(one, output), len(going))
                time.sleep(POLL_SECONDS)
        finally:
            for one in going:  # only after an error of our own
                one.process.kill()
                one.process.wait()


class _StopRequests:
    """Ctrl-C or SIGTERM: runs are asked to stop; they are killed when it comes again or takes too long."""

    def __init__(self) -> None:
        self.count, self._passed_on, self._since = 0, 0, 0.0

    def note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1

    def pass_on(self, going: Sequence[_Going]) -> None:
        if not self.count:
            return
        if self._passed_on == 0:
            self._since = time.monotonic()
        impatient = self.count > 1 or time.monotonic() - self._since > _PATIENCE_SECONDS
        if self._passed_on < 1 + impatient:
            self._passed_on = 1 + impatient
            for one in going:
                one.process.send_signal(signal.SIGKILL if impatient else signal.SIGTERM)


def _start(run: StudyRun, output: Path) -> subprocess.Popen[bytes]:
    name = run.key.replace("/", "-")
    settings, folder = output / "logs" / f"{name}.toml", output / run.key
    write_atomically(settings, run.config.to_toml())
    words = [*COMMAND, "train", str(settings), "--output", str(folder)]
    words += ["--resume"] * (folder / CONFIG_FILE).is_file()
    environment = {**os.environ, **_ONE_WORKER}
    try:
        with open(output / "logs" / f"{name}.log", "wb") as log:
            return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    except OSError as error:
        raise MegabatchError(
            f"run '{run.key}' could not be started: {error.strerror}; see to it and start again"
        ) from None


def _outcome(one: _Going, output: Path) -> Outcome:
    run, seconds = one.run, time.monotonic() - one.began
    status = _status(output / run.key)
    if one.process.returncode == 0 and status in ("finished", "stopped"):
        return Outcome(run, "finished" if status == "finished" else "stopped", seconds)
    if divergence(output / run.key, run.config) is not None:
        return Outcome(run, "diverged", seconds, "its gradients are not finite")
    lines = (output / "logs" / f"{run.key.replace('/', '-')}.log").read_text(errors="replace").strip().splitlines()
    code = one.process.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Outcome(run, "failed", seconds, (lines[-1].strip() if lines else "") or how)


def evaluate_ensembles(study: Study, output: Path) -> None:
    """Measure the finished ensembles that arms look at and nobody has measured; TrainingError when one fails."""
    folders = [output / key for arm in study.arms if "." in arm.metric for key in study.runs_of(arm)]
    for folder in dict.fromkeys(folders):
        if _status(folder) != "finished" or (folder / ENSEMBLE_FILE).is_file():
            continue
        command = [*COMMAND, "evaluate", str(folder), "--ensemble", "--json"]
        done = subprocess.run(
            command,
            env={**os.environ, **_ONE_WORKER},
            capture_output=True,
            text=True,
            timeout=_EVALUATION_SECONDS,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise TrainingError(f"the ensemble of '{folder}' could not be evaluated: {last}")
        write_json(folder / ENSEMBLE_FILE, json.loads(done.stdout.strip().splitlines()[-1]))
