"""Two hosts search with one journal, one of them is killed: is every trial run once, and none lost?

    sudo .venv/bin/python -m benchmarks.tune_hosts [--trials 10] [--epochs 12] [--json]

The network laboratory (`benchmarks.netlab`) holds two hosts. Both give the same `megabatch tune` with one `--output`,
as on a shared file system. When the second host has ended a run and has another under way that has saved a checkpoint,
all its processes are killed with -9. The first host goes on until no trial is left. Checked are:

    numbers     the trials are 0 to N - 1, each begun once in the journal
    runs        each run of each trial was ended by one host only
    shared      both hosts ended runs
    continued   the trial that was killed has ended, and its run went on from where it was: its first steps stayed
    collected   the same command once more, on the other host, runs nothing and says the same

Both hosts are one machine, with one kernel: locks of a network file system are not shown here. The recipe is tiny and
its images are generated: nothing is said about accuracy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.netlab import Network, laboratory
from benchmarks.netlab.laboratory import Laboratory
from benchmarks.netlab.namespaces import inside, processes_inside

SETTINGS = (
    *("data.source=generated", "data.generated.num_train=1000", "data.generated.num_val=20", "data.image_size=12"),
    *("model.width=8", "train.ghost_batch_size=10", "train.global_batch_size=20", "train.threads_per_worker=1"),
)
NETWORK = Network(2, 1, rate_mbit_per_second=200, latency_ms_one_way=1)
PATIENCE_SECONDS = 1200.0
_COLLECT_SECONDS = 600.0
_RUN = re.compile(r"trials/(\d{4})/rung-(\d)$")
_ENDED = re.compile(r"^trial (\d+) of .*?(?:after (\S+) epochs|diverged)", re.MULTILINE)


def command(output: Path, trials: int, epochs: float) -> list[str]:
    words = [sys.executable, "-m", "megabatch", "tune", "demo", "--output", str(output), "--trials", str(trials)]
    words += ["--epochs", str(epochs), "--rungs", "2", "--held-out", "100", "--jobs", "1"]
    words += ["--search", "optimizer.lr_factor=0.1:10:log"]
    return [*words, *(word for one in SETTINGS for word in ("--set", one))]


@contextlib.contextmanager
def hosts_at_work(lab: Laboratory, words: list[str], told: Sequence[Path]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The same command on every host, at the same time; what is left of it is ended afterwards."""
    with contextlib.ExitStack() as stack:
        processes = []
        for namespace, path in zip(lab.namespaces, told, strict=True):
            output = stack.enter_context(path.open("wb"))
            with inside(namespace):
                process = subprocess.Popen(
                    words,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "nic0"},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def run_under_way(lab: Laboratory, host: int) -> Path | None:
    """The folder of the run that a host's training process works on."""
    for pid in processes_inside([lab.namespaces[host]]):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "train" in words and "--output" in words:
                return Path(words[words.index("--output") + 1])
    return None


def kill_host(lab: Laboratory, host: int) -> None:
    """All processes of a host at once, as when its power fails."""
    while pids := [pid for pid in processes_inside([lab.namespaces[host]]) if pid != os.getpid()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@dataclass(frozen=True)
class Killed:
    """The run that a host worked on when it was killed, and the rows of steps that were safe in a checkpoint then."""

    run: Path
    saved_rows: list[bytes]

    @property
    def trial(self) -> int:
        found = _RUN.search(str(self.run))
        assert found is not None, self.run
        return int(found[1])

    def went_on(self) -> bool:
        """Whether the run ended with the very rows that were safe, times included: it was not begun again."""
        rows = rows_of(self.run)
        ended = (self.run / "summary.json").is_file()
        return ended and bool(self.saved_rows) and rows[: len(self.saved_rows)] == self.saved_rows


def rows_of(run: Path) -> list[bytes]:
    path = run / "metrics.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def saved_steps(run: Path) -> int:
    """The step of the newest checkpoint that is whole."""
    found = [
        int(name.group(1)) for path in run.glob("checkpoints/*") if (name := re.match(r"step-(\d+)\.pt$", path.name))
    ]
    return max(found, default=0)


def ended_runs(told: str) -> list[tuple[int, str]]:
    """(trial, epochs) of the runs that a host said to have ended."""
    return [(int(found[1]), found[2] or "diverged") for found in _ENDED.finditer(told)]


def begun_trials(journal: Path) -> int:
    """How many trials the journal has begun: in Optuna's journal, operation 4 makes one."""
    lines = journal.read_bytes().split(b"\n")[:-1]
    return sum(json.loads(line)["op_code"] == 4 for line in lines)


def problems_of(
    trials: int, rows: Sequence[dict[str, Any]], ended: Sequence[Sequence[tuple[int, str]]], begun: int, killed: int
) -> list[str]:
    """What is wrong with trials, rows of `tune.json`, runs ended by host, and trials begun in the journal."""
    problems = []
    numbers = [row["trial"] for row in rows]
    if numbers != list(range(trials)) or begun != trials:
        problems.append(f"numbers: the trials are {numbers}, {begun} were begun, {trials} were asked for")
    every = [run for of_host in ended for run in of_host]
    if twice := sorted({run for run in every if every.count(run) > 1}):
        problems.append(f"runs: ended more than once: {twice}")
    if never := sorted(set(range(trials)) - {number for number, _ in every}):
        problems.append(f"runs: no host ended one of trials {never}")
    if not all(ended):
        problems.append("shared: a host ended no run")
    if unfinished := [row["trial"] for row in rows if row["outcome"] == "under way"]:
        problems.append(f"continued: trials {unfinished} have not ended")
    if killed not in {number for number, _ in ended[0]}:
        problems.append(f"continued: trial {killed} was not ended by the host that was left")
    return problems


def wait(met: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], what: str, told: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not met():
        if any(process.poll() is not None for process in processes):
            raise SystemExit(f"a host ended before {what}:\n{told.read_text(errors='replace')[-2000:]}")
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE_SECONDS:g} s for {what}")
        time.sleep(0.01)


def measure(trials: int, epochs: float, scratch: Path) -> dict[str, Any]:
    output, told = scratch / "search", [scratch / "first.told", scratch / "second.told"]
    words = command(output, trials, epochs)
    with laboratory(NETWORK) as lab:
        with hosts_at_work(lab, words, told) as (first, second):

            def is_in_the_middle() -> bool:
                run = run_under_way(lab, 1)
                return run is not None and saved_steps(run) > 0 and bool(ended_runs(told[1].read_text()))

            wait(is_in_the_middle, [first, second], "the second host has ended a run and is in another", told[1])
            run = run_under_way(lab, 1)
            kill_host(lab, 1)
            if run is None or (run / "summary.json").exists():
                raise SystemExit("the run ended before its host could be killed; give more --epochs")
            killed = Killed(run, rows_of(run)[: saved_steps(run)])
            second.wait(timeout=30)
            code = first.wait(timeout=PATIENCE_SECONDS)
        if code:
            raise SystemExit(f"the first host ended with {code}:\n{told[0].read_text(errors='replace')[-2000:]}")
        whole = json.loads((output / "tune.json").read_text())
        with inside(lab.namespaces[1]):
            collecting = subprocess.Popen([*words, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        collected, said = collecting.communicate(timeout=_COLLECT_SECONDS)
    ended = [ended_runs(path.read_text()) for path in told]
    problems = problems_of(trials, whole["trials"], ended, begun_trials(output / "journal.log"), killed.trial)
    if not killed.went_on():
        problems.append(f"continued: the run of trial {killed.trial} did not go on from where it was")
    if collecting.returncode or ended_runs(said) or json.loads(collected) != whole:
        problems.append(f"collected: the same command ran something or says something else: {said[-500:]}")
    return {
        "trials": trials,
        "runs_ended_by_host": [len(runs) for runs in ended],
        "killed_in_trial": killed.trial,
        "steps_saved_then": len(killed.saved_rows),
        "best": whole["best"],
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=float, default=12.0)
    parser.add_argument("--keep", type=Path, help="a folder where the search stays, to look at")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        found = measure(options.trials, options.epochs, scratch.absolute())
    if options.json:
        print(json.dumps(found))
    else:
        first, second = found["runs_ended_by_host"]
        print(f"{found['trials']} trials; runs ended by the first host {first}, by the second {second} before its end")
        print(f"killed in trial {found['killed_in_trial']} with {found['steps_saved_then']} steps saved")
        print("every trial once, continued, collected" if not found["problems"] else "\n".join(found["problems"]))
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
