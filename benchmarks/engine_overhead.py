"""What the engine costs: time per update of `megabatch train` over a bare hand-written DDP loop.

    python -m benchmarks.engine_overhead [--rounds 8] [--updates 40] [--workers 2]

Both train the demo's network on Fashion-MNIST with the same batch and ghost batches. Rounds alternate (engine, bare,
bare, engine, ...), each round starts fresh processes, the first `--warm-up` updates of each are dropped, and a round's
time is the median over its updates of the wall-clock from the end of one update to the end of the next: logging,
progress, metrics and TensorBoard of the engine are inside. The ratio is taken between neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

TARGET = 1.03


def engine_seconds(workers: int, updates: int, warm_up: int, folder: Path) -> float:
    output = folder / "run"
    command = [sys.executable, "-m", "megabatch", "train", "demo", "--workers", str(workers), "--output", str(output)]
    settings = [f"train.max_updates={updates}", "train.evaluate_every_epochs=0", "checkpoint.every_epochs=0"]
    settings += ["optimizer.learning_rate=0.1", "train.threads_per_worker=1", "train.batch_total=1024"]
    settings += ["comm.algorithm=backend"]  # as the bare loop: what is compared is the engine, not the all-reduce
    subprocess.run(
        [*command, *(word for setting in settings for word in ("--set", setting))],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    # The last update is followed by the final evaluation, which the bare loop does not have.
    return per_update([row["wall_seconds"] for row in rows[:-1]], warm_up)


def bare_seconds(workers: int, updates: int, warm_up: int, folder: Path) -> float:
    output = folder / "times.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    subprocess.run(
        [*launcher, "-m", "benchmarks.bare_loop", "--updates", str(updates), "--output", str(output)],
        check=True,
        stderr=subprocess.DEVNULL,
        timeout=600,
    )
    return per_update(json.loads(output.read_text())[:-1], warm_up)


def per_update(ends: list[float], warm_up: int) -> float:
    return statistics.median(b - a for a, b in pairwise(ends[warm_up:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ratios, engine_times, bare_times = [], [], []
    for number in range(options.rounds):
        pair: dict[str, float] = {}
        for name in ("engine", "bare") if number % 2 == 0 else ("bare", "engine"):
            run = engine_seconds if name == "engine" else bare_seconds
            with tempfile.TemporaryDirectory() as folder:
                pair[name] = run(options.workers, options.updates, options.warm_up, Path(folder))
        ratios.append(pair["engine"] / pair["bare"])
        engine_times.append(pair["engine"])
        bare_times.append(pair["bare"])
        if not options.json:
            print(f"round {number + 1}: engine {pair['engine']:.4f} s, bare {pair['bare']:.4f} s, {ratios[-1]:.3f}")
    ratios.sort()
    result = {
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "rounds": len(ratios),
        "updates_per_round": options.updates - options.warm_up - 2,
        "engine_seconds_per_update": statistics.median(engine_times),
        "bare_seconds_per_update": statistics.median(bare_times),
        "workers": options.workers,
        "target": TARGET,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"engine / bare DDP loop: median {result['ratio_median']:.3f} [{ratios[0]:.3f} - {ratios[-1]:.3f}], "
            f"n = {len(ratios)} rounds, {options.workers} workers (at most {TARGET} wanted)"
        )


if __name__ == "__main__":
    main()
