"""How long does a killed worker cost? Seconds from kill -9 of one of 4 workers to the next finished step.

    python -m benchmarks.recovery [--rounds 10] [--json]

Four ways take turns: an elastic run; the restart of local workers from the last checkpoint (`--workers 4`, one after
each step); torchft's own manager around a DDP loop; torchrun's restart of a bare DDP loop that saves its state after
each step (`benchmarks.peer_loops`). All train the same small network. A step counts when it is later than any step that
was finished before the kill. What it costs the others when a worker joins is what the elastic run notes in
membership.jsonl, from the last step to the world with the new worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.disturbed import WORKERS, command

WAYS = ("elastic", "restart", "torchft alone", "torchrun, bare DDP")
STEPS = 100_000  # the runs are ended from outside
WORKER_MARKS = {"torchft alone": "--torchft-worker", "torchrun, bare DDP": "--torchrun"}  # others: "spawn_main"


def words_of(way: str, folder: Path, checkpoint_steps: int = 1) -> list[str]:
    """The command that starts a run of 4 workers; a restart goes on from a checkpoint at most so many steps old."""
    if way.startswith("torchrun"):
        launcher = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "1000"]
        loop = ["-m", "benchmarks.peer_loops", "--torchrun", str(folder)]
        return [sys.executable, "-m", "torch.distributed.run", *launcher, *loop]
    if way.startswith("torchft"):
        return [sys.executable, "-m", "benchmarks.peer_loops", "--torchft", str(folder)]
    words = [*command(folder, STEPS), "--set", f"checkpoint.every_steps={checkpoint_steps}", "--workers", str(WORKERS)]
    return [*words, *["--elastic"] * (way == "elastic")]


@contextlib.contextmanager
def started(way: str, folder: Path, checkpoint_steps: int = 1) -> Iterator[psutil.Popen]:
    """A run in FOLDER/run while the block lasts."""
    folder.mkdir(parents=True)
    words = words_of(way, folder / "run", checkpoint_steps)
    # torchrun 2.13 keeps one store for all its attempts, and new workers may read the addresses of dead ones there.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "told").open("wb") as told:
        launcher = psutil.Popen(words, stdout=told, stderr=told, env=environment, start_new_session=True)
        family: list[psutil.Process] = [launcher]
        try:
            yield launcher
        finally:
            with contextlib.suppress(psutil.Error):
                family += launcher.children(recursive=True)
            for process in family:  # torchrun puts its workers into sessions of their own
                with contextlib.suppress(psutil.Error):
                    process.kill()
            launcher.wait(timeout=30)


def workers_of(way: str, launcher: psutil.Popen) -> list[psutil.Process]:
    """The workers of a run that live, oldest first."""
    mark, found = WORKER_MARKS.get(way, "spawn_main"), []
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if mark in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def last_step(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except FileNotFoundError:
        return 0


def wait_for_step(folder: Path, step: int, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while last_step(folder) < step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {step} within {seconds:g} s")
        time.sleep(0.005)


def recover(way: str, folder: Path) -> dict[str, Any]:
    """Kill a worker of a new run; the seconds until the run goes on, and the cost of each join."""
    run = folder / "run"
    with started(way, folder) as launcher:
        wait_for_step(run, 15)
        victim = workers_of(way, launcher)[-1]
        victim.kill()
        began, before = time.monotonic(), last_step(run)
        wait_for_step(run, before + 2)  # one may have been finished as the worker died
        seconds = time.monotonic() - began
        return {"seconds": seconds, "joins": wait_for_join(run) if way == "elastic" else []}


def wait_for_join(run: Path, seconds: float = 120.0) -> list[float]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        changes = [json.loads(line) for line in (run / "membership.jsonl").read_bytes().split(b"\n")[:-1]]
        if joins := [change["seconds"] for change in changes if change["joined"]]:
            return joins
        time.sleep(0.2)
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in (*WAYS, "a join, for the others")}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for way in WAYS:
                result = recover(way, Path(scratch) / f"{number} {way}")
                found[way].append(result["seconds"])
                found["a join, for the others"] += result["joins"]
                if not options.json:
                    print(f"round {number + 1}, {way}: {result['seconds']:.2f} s", flush=True)
    if options.json:
        print(json.dumps(found))
        return
    for way, values in found.items():
        if values:
            spread = f"{min(values):.2f} to {max(values):.2f}, n={len(values)}"
            print(f"{way:24} median {statistics.median(values):6.2f} s, {spread}")


if __name__ == "__main__":
    main()
