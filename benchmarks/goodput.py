"""How much work is left when workers keep dying? Goodput of 4 workers, one killed every 20 seconds.

    python -m benchmarks.goodput [--seconds 120] [--every 20] [--rounds 3] [--json]

The ways of `benchmarks.recovery` take turns; a restart goes on from a checkpoint of every 7 steps, the bare loop from
one of every step. Each run is first left alone for 20 s, which gives its undisturbed images per second. Then a random
worker is killed every 20 s; after `--seconds` the images in the steps that the model really has are counted. Steps made
twice count once. Goodput is images per second under faults / undisturbed, in the same run. Lost are images that a step
of full size would have had and this one did not: torchft goes on with a smaller batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.disturbed import WORKERS
from benchmarks.peer_loops import IMAGES
from benchmarks.recovery import WAYS, started, wait_for_step, workers_of

ALONE_SECONDS = 20.0
CHECKPOINT_STEPS = 7
GLOBAL_BATCH = IMAGES * WORKERS


def images_by_step(run: Path) -> dict[int, int]:
    """Images of each step that the model has: of a step made twice, the last row."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
    return {int(row["step"]): int(row.get("images", GLOBAL_BATCH)) for row in rows}


def measure(way: str, folder: Path, seconds: float, every: float, chance: random.Random) -> dict[str, Any]:
    """Goodput of one run."""
    run, kills = folder / "run", 0
    with started(way, folder, CHECKPOINT_STEPS) as launcher:
        wait_for_step(run, 15)
        before, began = images_by_step(run), time.monotonic()
        time.sleep(ALONE_SECONDS)
        middle, disturbed = images_by_step(run), time.monotonic()
        alone = (sum(middle.values()) - sum(before.values())) / (disturbed - began)
        while (passed := time.monotonic() - disturbed) < seconds:
            if passed >= kills * every:
                with contextlib.suppress(psutil.Error, IndexError):  # all may be starting again
                    chance.choice(workers_of(way, launcher)).kill()
                kills += 1
            time.sleep(0.05)
        after, ended = images_by_step(run), time.monotonic()
    images = {step: count for step, count in after.items() if step > max(middle)}
    rate = sum(images.values()) / (ended - disturbed)
    lost = sum(GLOBAL_BATCH - count for count in images.values())
    return {"alone": alone, "disturbed": rate, "goodput": rate / alone, "kills": kills, "lost_images": lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for way in WAYS:
                chance = random.Random(number)
                result = measure(way, Path(scratch) / f"{number} {way}", options.seconds, options.every, chance)
                found[way].append(result)
                if not options.json:
                    print(f"round {number + 1}, {way}: goodput {result['goodput']:.2f}", flush=True)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'way':20} {'goodput: median (least to most)':34} {'images/s alone':>14} {'kills':>6} {'lost images':>12}")
    for way, results in found.items():
        shares = [one["goodput"] for one in results]
        spread = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f}, n={len(shares)})"
        alone = statistics.median(one["alone"] for one in results)
        kills, lost = (sum(one[key] for one in results) for key in ("kills", "lost_images"))
        print(f"{way:20} {spread:34} {alone:14.0f} {kills:6} {lost:12}")


if __name__ == "__main__":
    main()
