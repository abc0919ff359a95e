"""Does a recipe with sums in floats compute the same on any number of workers? Losses of 40 steps on 1 to 4 workers.

    python -m benchmarks.worker_counts [--steps 40] [--workers 1 2 3 4]

Exact sums have `exact_bits` instead: their losses are equal to the last bit. Trains the demo recipe (batch-norm,
augmentation, label smoothing) on Fashion-MNIST; its 8 ghost batches a step are not divisible by 3. Training amplifies
rounding: at the recipe's own learning rate (--lr 0) the runs drift apart like two runs whose sums were added up in
another order. So the claim is tested at a learning rate low enough to see a mistake of the engine. Prints the largest
relative difference of any step's loss to the one-worker run, and whether the augmented images of all ghost batches are
bit-identical when that many workers share them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from megabatch.data.augment import Augmentation
from megabatch.data.formats import open_source
from megabatch.data.loader import GhostLoader
from megabatch.recipes import load_config
from megabatch.schedule.batch import iterate_steps, parse_stages

TARGET = 1e-4


def losses(workers: int, steps: int, lr: float, folder: Path) -> list[float]:
    output = folder / f"workers-{workers}"
    settings = [
        "comm.sums=float",
        f"train.max_steps={steps}",
        "train.evaluate_every_epochs=0",
        "checkpoint.every_epochs=0",
    ]
    settings += [f"optimizer.lr={lr}"] if lr else []
    command = [sys.executable, "-m", "megabatch", "train", "demo", "--workers", str(workers), "--output", str(output)]
    subprocess.run(
        [*command, *(word for setting in settings for word in ("--set", setting))],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=900,
    )
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def image_digests(workers: int, steps: int) -> dict[int, str]:
    """SHA-256 of every ghost batch's pixels and labels, by the number of the ghost batch."""
    config = load_config("demo")
    source = open_source("fashion-mnist", None, "train")
    digests: dict[int, str] = {}
    for worker in range(workers):
        global_batch_size_at = parse_stages(config.train.global_batch_size).at
        total_samples = steps * global_batch_size_at(0.0)
        schedule = iterate_steps(global_batch_size_at, config.train.ghost_batch_size, len(source), total_samples)
        of_worker = (replace(step, rank=worker, world_size=workers) for step in schedule)
        augmentation = Augmentation(**config.data.augment.model_dump())
        loader = GhostLoader(source, augmentation, config.data.image_size, 0, of_worker)
        for _, ghosts in loader:
            for ghost in ghosts:
                data = ghost.images.numpy().tobytes() + ghost.labels.numpy().tobytes()
                digests[ghost.number] = hashlib.sha256(data).hexdigest()
        loader.close()
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate; 0: the recipe's own warm-up")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        alone = losses(1, options.steps, options.lr, Path(folder))
        pixels = image_digests(1, options.steps)
        for workers in options.workers:
            theirs = alone if workers == 1 else losses(workers, options.steps, options.lr, Path(folder))
            assert len(theirs) == len(alone) == options.steps
            worst = max(abs(a - b) / abs(a) for a, b in zip(alone, theirs, strict=True))
            same = image_digests(workers, options.steps) == pixels
            rows.append({"workers": workers, "worst_relative_difference": worst, "images_identical": same})
            if not options.json:
                text = "bit-identical" if same else "DIFFER"
                print(
                    f"{workers} workers: losses differ by at most {worst:.2e} (relative), {len(pixels)} ghosts {text}"
                )
    if options.json:
        print(json.dumps({"steps": options.steps, "target": TARGET, "rows": rows}))
    else:
        worst = max(row["worst_relative_difference"] for row in rows)
        print(f"worst over {options.steps} steps: {worst:.2e} (at most {TARGET:g} wanted)")


if __name__ == "__main__":
    main()
