"""The demo while workers are killed: the same weights, bit for bit, as the demo that nobody disturbs.

    make demo-chaos
    python -m benchmarks.demo_chaos [--epochs 2] [--output FOLDER] [--set data.source=generated]

Trains the demo on one worker, undisturbed. Then trains it as an elastic run on four workers and kills some of them
with SIGKILL: one worker, the main rank, then two workers at once. The launcher replaces each of them by a new process.
At the end it shows the SHA-256 of both models, the seconds that each fault cost, and the report. Exit code 1 when the
models differ or a fault could not be made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

WORKERS = 4
FAULTS = ((0.2, "one worker"), (0.45, "the main rank"), (0.7, "two workers at once"))
"""At which part of the run, and who."""
_POLL_SECONDS = 0.005
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Fault:
    """What a fault cost. seconds: from the kill to the next finished step; step_seconds: a median step before it."""

    victims: str
    step: int
    seconds: float
    step_seconds: float


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a file that is being written."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []


def sha256_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def start(folder: Path, options: argparse.Namespace, *words: str) -> subprocess.Popen[str]:
    """Start a run; its lines are shown as they come."""
    command = [sys.executable, "-m", "megabatch", "train", "demo", "--epochs", str(options.epochs)]
    # On a fast machine all of this ends before a worker is old enough to be replaced without being counted.
    changes = ["comm.max_restarts=20", *options.set]
    command += ["--output", str(folder), *words, *(word for one in changes for word in ("--set", one))]
    print(f"\n$ megabatch {' '.join(command[3:])}", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    threading.Thread(target=_show, args=(process,), daemon=True).start()
    return process


def _show(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"  {line}", end="", flush=True)


def workers_of(process: subprocess.Popen[str], folder: Path) -> tuple[list[psutil.Process], psutil.Process | None]:
    """The workers of a run, and the main rank among them: it holds the file of the metrics open."""
    metrics, workers, main = str((folder / "metrics.jsonl").resolve()), [], None
    with suppress(psutil.Error):  # the run is over
        for child in psutil.Process(process.pid).children():
            with suppress(psutil.Error):  # this one has just ended
                if "spawn_main" in " ".join(child.cmdline()):
                    workers.append(child)
                    main = child if metrics in [file.path for file in child.open_files()] else main
    return workers, main


def cause(what: str, process: subprocess.Popen[str], folder: Path) -> Fault | None:
    """Kill workers once all are there, and wait for the next step; None when the run ends before."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        changes = rows_of(folder / "membership.jsonl")
        workers, main = workers_of(process, folder)
        others = [worker for worker in workers if worker != main]
        if (not changes or changes[-1]["workers"] == WORKERS) and main is not None and len(others) == WORKERS - 1:
            break
        if process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    victims = {"one worker": others[1:2], "the main rank": [main], "two workers at once": others[:2]}[what]
    rows = rows_of(folder / "metrics.jsonl")
    recent = sorted(row["step_seconds"] for row in rows[-20:])
    print(f"  --- kill -9 {what}, after step {len(rows)} ---", flush=True)
    began = time.monotonic()
    for victim in victims:
        victim.kill()
    while len(rows_of(folder / "metrics.jsonl")) == len(rows):
        if process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)
    return Fault(what, len(rows), time.monotonic() - began, recent[len(recent) // 2])


def disturb(process: subprocess.Popen[str], folder: Path, num_steps: int) -> list[Fault]:
    """Make every fault at its time; returns those that were made."""
    made = []
    for part, what in FAULTS:
        while len(rows_of(folder / "metrics.jsonl")) < part * num_steps and process.poll() is None:
            time.sleep(0.05)
        fault = cause(what, process, folder) if process.poll() is None else None
        made += [fault] if fault else []
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--output", type=Path, default=Path("runs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the recipe")
    options = parser.parse_args()
    calm, elastic = options.output / "undisturbed", options.output / "elastic"

    if start(calm, options, "--workers", "1").wait():
        sys.exit(1)
    process = start(elastic, options, "--workers", str(WORKERS), "--elastic")
    try:
        faults = disturb(process, elastic, len(rows_of(calm / "metrics.jsonl")))
        if process.wait():
            sys.exit(1)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()  # its workers end with it

    joins = [row["seconds"] for row in rows_of(elastic / "membership.jsonl") if row["joined"]]
    print("\nkilled with -9        after step   next step done   a step before")
    for fault in faults:
        print(f"{fault.victims:<20}  {fault.step:>10}   {fault.seconds:>12.2f} s   {fault.step_seconds:>11.2f} s")
    print(f"replaced workers took part again; each time all waited {', '.join(f'{one:.2f}' for one in joins)} s")
    digests = [sha256_of(calm), sha256_of(elastic)]
    print(f"\nundisturbed, 1 worker     SHA-256 {digests[0]}")
    print(f"elastic, {WORKERS} workers        SHA-256 {digests[1]}")
    print("the same weights, bit for bit" if len(set(digests)) == 1 else "THE WEIGHTS DIFFER")
    if len(faults) < len(FAULTS):
        print(f"only {len(faults)} of {len(FAULTS)} faults were made: the run was too short for all of them")
    print(f"report         {elastic / 'report.html'}")
    sys.exit(len(set(digests)) > 1 or len(faults) < len(FAULTS))


if __name__ == "__main__":
    main()
