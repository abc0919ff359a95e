"""What the engine costs: time per step of `megabatch train` over a bare hand-written DDP loop.

    python -m benchmarks.engine_overhead [--rounds 12] [--block-seconds 3] [--workers 2]

Both train the demo's network on Fashion-MNIST with the same batch and ghost batches, both are started once, and then
take turns of a few seconds: one is stopped (SIGSTOP) while the other runs, in an order that changes with every round.
A step's time is the wall-clock from its end back to the end of the one before, so logging, progress, metrics and
TensorBoard of the engine are inside; steps that span a stop are left out. A round's ratio is between the medians of
its two blocks, next to each other in time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

TARGET = 1.03
MANY_STEPS = 1_000_000
SETTINGS = (
    *("train.epochs=100000", "train.evaluate_every_epochs=0", "checkpoint.every_epochs=0"),
    *("optimizer.lr=0.1", "train.threads_per_worker=1", "train.global_batch_size=1024"),
    "comm.algorithm=backend",  # as the bare loop: what is compared is the engine, not the all-reduce
)


class Contestant:
    """A training under way: a launcher, its workers, and the file to which it writes a line per step.

    told: a file for all that it says.
    """

    def __init__(self, words: list[str], log: Path, told: Path) -> None:
        self.log, self._told = log, told
        with told.open("wb") as output:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def rows(self) -> list[dict[str, Any]]:
        """What it wrote about each step so far."""
        if self._process.poll() is not None:
            said = self._told.read_text(errors="replace").strip().splitlines()[-5:]
            raise SystemExit("\n".join([*said, f"{self._told.stem} ended with {self._process.returncode}"]))
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_bytes().split(b"\n")[:-1]]

    def ends(self) -> list[float]:
        """When each step so far ended, in seconds on the contestant's own clock."""
        return [row["wall_seconds"] for row in self.rows()]

    def wait_for(self, steps: int, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while len(self.ends()) < steps:
            if time.monotonic() > deadline:
                raise SystemExit(f"no {steps} steps within {seconds:g} s")
            time.sleep(0.1)

    def pause(self) -> None:
        for process in self._family():
            process.suspend()

    def run_for(self, seconds: float) -> list[float]:
        """Let it run for a while, at least two steps; the times of the steps that lie within."""
        before = len(self.ends())
        for process in self._family():
            process.resume()
        time.sleep(seconds)
        self.wait_for(before + 2)
        self.pause()
        # The first step of the block began before the pause.
        return [end - start for start, end in pairwise(self.ends()[before:])]

    def kill(self) -> None:
        for process in self._family():
            process.kill()
        self._process.wait(timeout=30)

    def _family(self) -> list[psutil.Process]:
        launcher = psutil.Process(self._process.pid)
        return [*launcher.children(recursive=True), launcher]


def start_engine(workers: int, folder: Path, settings: Sequence[str] = SETTINGS) -> Contestant:
    words = [sys.executable, "-m", "megabatch", "train", "demo", "--workers", str(workers), "--output", str(folder)]
    words += [word for setting in settings for word in ("--set", setting)]
    return Contestant(words, folder / "metrics.jsonl", folder.with_name(f"{folder.name}.told"))


def start_torchrun(workers: int, log: Path, words: Sequence[str]) -> Contestant:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return Contestant([*launcher, "-m", *words, "--output", str(log)], log, log.with_suffix(".told"))


def start_bare(workers: int, log: Path) -> Contestant:
    return start_torchrun(workers, log, ["benchmarks.bare_loop", "--steps", str(MANY_STEPS)])


def take_turns(
    rounds: int, block_seconds: float, starts: Sequence[Callable[[], Contestant]], seed: int = 0
) -> list[tuple[float, ...]]:
    """Seconds per step of every contestant in every round; all others stand still while one starts or runs.

    The order is drawn anew for every other round, and the round after it goes the other way round.
    """
    with ExitStack() as stack:
        contestants = []
        for start in starts:
            contestants.append(start())
            stack.callback(contestants[-1].kill)
            contestants[-1].wait_for(5)
            contestants[-1].pause()
        medians, chance, order = [], random.Random(seed), list(range(len(contestants)))
        for number in range(rounds):
            if number % 2:
                order.reverse()
            else:
                chance.shuffle(order)
            found = {place: statistics.median(contestants[place].run_for(block_seconds)) for place in order}
            medians.append(tuple(found[place] for place in range(len(contestants))))
        return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block-seconds", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        medians = take_turns(
            options.rounds,
            options.block_seconds,
            (
                lambda: start_engine(options.workers, Path(folder) / "engine"),
                lambda: start_bare(options.workers, Path(folder) / "bare.jsonl"),
            ),
        )
    ratios = sorted(engine / bare for engine, bare in medians)
    result = {
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "rounds": len(ratios),
        "engine_seconds_per_step": statistics.median(engine for engine, _ in medians),
        "bare_seconds_per_step": statistics.median(bare for _, bare in medians),
        "workers": options.workers,
        "target": TARGET,
    }
    if options.json:
        print(json.dumps(result))
        return
    for number, (engine, bare) in enumerate(medians, start=1):
        print(f"round {number:2}: engine {engine:.4f} s, bare {bare:.4f} s a step, ratio {engine / bare:.3f}")
    print(
        f"engine / bare DDP loop: median {result['ratio_median']:.3f} [{ratios[0]:.3f} - {ratios[-1]:.3f}], "
        f"n = {len(ratios)} rounds, {options.workers} workers (at most {TARGET} wanted)"
    )


if __name__ == "__main__":
    main()
