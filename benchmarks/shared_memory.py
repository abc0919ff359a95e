"""Ranks of one host through shared memory, against Gloo's own all-reduce over loopback; and what it does to the demo.

    python -m benchmarks.shared_memory [--rounds 20] [--demo-rounds 6] [--json out.json]

Four local ranks reduce int32 as exact sums do. In every round each way makes a few all-reduces, in an order drawn anew;
a time is that of the slowest rank, and a ratio is taken within a round, so a busy machine is busy for both. Printed are
medians with the smallest and largest, and n. "it over Gloo" is the same algorithm with shared memory turned off.

The demo recipe (4 workers, 2x2) makes some steps with `comm.shared_memory` on and off in turn. Its communication share
is the part of a step that backward waits for gradients after its own work is done, of rank 0, as `metrics.jsonl` has
it. It contains waiting for slower workers, which no transport removes. Each pair of runs is one observation.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gate import local_ranks

RANKS = 4
WANTED = {100_000: 2.0, 1_000_000: 2.5, 10_000_000: 2.5}
"""Message bytes -> how many times as fast as Gloo's own all-reduce."""

CASES = (("1x4", "torus"), ("2x2", "torus"))
LEFT_OUT_STEPS = 5
_TIMEOUT_SECONDS = 1200.0

Times = dict[str, list[float]]


def measure(rank: int, rounds: int, shape: str, algorithm: str) -> dict[int, Times]:
    """On every rank: seconds of one all-reduce by way and round, for each size."""
    import torch
    import torch.distributed as dist

    from megabatch.comm.allreduce import AllReducer
    from megabatch.comm.grid import ProcessGrid

    dist.init_process_group("gloo")
    on = ProcessGrid.build(shape, timeout_seconds=60)
    off = ProcessGrid.build(shape, timeout_seconds=60, shared_memory=False)
    assert all(axis in on.memory for axis in on.shape.axes), "this machine offers no shared memory; megabatch logs why"
    ways = {
        "shared": AllReducer(on, algorithm).run,
        "same": AllReducer(off, algorithm).run,
        "gloo": AllReducer(off, "backend").run,
    }
    found: dict[int, Times] = {}
    for message_bytes in WANTED:
        tensor = torch.zeros(message_bytes // 4, dtype=torch.int32)
        repeats = max(2, min(20, 4_000_000 // message_bytes))
        times: Times = {name: [] for name in ways}
        drawn = random.Random(message_bytes)
        for turn in range(rounds + 1):  # the first is to warm up
            for name in drawn.sample(list(ways), len(ways)):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    ways[name](tensor)
                slowest = torch.tensor([(time.perf_counter() - start) / repeats])
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if turn:
                    times[name].append(float(slowest))
        found[message_bytes] = times
    on.close()
    off.close()
    dist.destroy_process_group()
    return found


def ratios(times: Times, of: str, over: str = "shared") -> list[float]:
    """How many times as long as `over` the way `of` took, round by round."""
    return [slow / fast for slow, fast in zip(times[of], times[over], strict=True)]


def table_lines(found: dict[str, dict[int, Times]]) -> list[str]:
    """A row per grid and size."""
    lines = [
        "| grid | bytes | shared memory, ms | Gloo's all-reduce, ms | times as fast | wanted | it over Gloo | n |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, sizes in found.items():
        for message_bytes, times in sizes.items():
            middles = [f"{1e3 * statistics.median(times[name]):.2f}" for name in ("shared", "gloo")]
            columns = [case, f"{message_bytes:,}", *middles, spread(ratios(times, "gloo"))]
            columns += [f"{WANTED[message_bytes]:g}", spread(ratios(times, "same")), str(len(times["gloo"]))]
            lines.append(f"| {' | '.join(columns)} |")
    return lines


def spread(values: Sequence[float]) -> str:
    """Median, smallest and largest."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"


class Demo(NamedTuple):
    """One run of the demo: medians over its steps but the first ones."""

    share: float
    communication_seconds: float
    step_seconds: float


def read_demo(rows: Sequence[dict[str, Any]]) -> Demo:
    """What the rows of `metrics.jsonl` tell."""
    later = [row for row in rows if row.get("step", 0) > LEFT_OUT_STEPS and "communication_seconds" in row]
    waits, steps = ([float(row[key]) for row in later] for key in ("communication_seconds", "step_seconds"))
    shares = [wait / step for wait, step in zip(waits, steps, strict=True)]
    return Demo(statistics.median(shares), statistics.median(waits), statistics.median(steps))


def demo(rounds: int, steps: int) -> dict[str, list[Demo]]:
    """The demo with shared memory and without, in turn."""
    found: dict[str, list[Demo]] = {"true": [], "false": []}
    for turn in range(rounds):
        for setting in ("true", "false") if turn % 2 else ("false", "true"):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / "run"
                command = [sys.executable, "-m", "megabatch", "train", "demo", "--workers", str(RANKS), "--grid", "2x2"]
                settings = ("data.source=generated", "data.generated.num_val=256", f"train.max_steps={steps}")
                options = [part for one in (*settings, f"comm.shared_memory={setting}") for part in ("--set", one)]
                subprocess.run(
                    [*command, "--output", str(folder), *options],
                    check=True,
                    capture_output=True,
                    timeout=_TIMEOUT_SECONDS,
                )
                lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                found[setting].append(read_demo([json.loads(line) for line in lines]))
    return found


def demo_lines(found: dict[str, list[Demo]]) -> list[str]:
    """Share and seconds with and without, and how much of them is left."""
    lines = [
        f"demo, comm.shared_memory={setting}: {spread([100 * run.share for run in runs])} % of a step is exposed "
        f"communication, {spread([1e3 * run.communication_seconds for run in runs])} of "
        f"{spread([1e3 * run.step_seconds for run in runs])} ms, n = {len(runs)}"
        for setting, runs in found.items()
    ]
    pairs = list(zip(found["true"], found["false"], strict=True))
    for index, what in enumerate(("share", "communication", "step")):
        lines.append(f"{what} with over without, by pair: {spread([on[index] / off[index] for on, off in pairs])}")
    return [*lines, "a share of at most 0.5 was wanted"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--demo-rounds", type=int, default=6)
    parser.add_argument("--demo-steps", type=int, default=40)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    found: dict[str, dict[int, Times]] = {}
    for shape, algorithm in CASES:
        answers = local_ranks(RANKS, measure, options.rounds, shape, algorithm, timeout_seconds=_TIMEOUT_SECONDS)
        found[f"{shape} {algorithm}"] = answers[0]
    print(*table_lines(found), sep="\n", flush=True)
    shares = demo(options.demo_rounds, options.demo_steps)
    if options.demo_rounds:
        print(*demo_lines(shares), sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"all_reduce": found, "demo": shares}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
