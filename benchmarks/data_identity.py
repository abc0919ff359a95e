"""The same images in the same order, bit for bit: 1, 2, 4 workers x 0, 1, 2 loader processes, and 50 resumed
positions.

    python -m benchmarks.data_identity --data FOLDER [--images 2000] [--positions 50] [--json]

The expectation is one worker with one thread. FOLDER holds any set that `megabatch data verify` can open.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megabatch.data.augment import Augmentation
from megabatch.data.batches import LoaderSettings
from megabatch.data.formats import open_splits
from megabatch.data.loader import GhostLoader
from megabatch.data.sources import Source
from megabatch.schedule.batch import Step, iterate_steps, parse_stages

GHOST, SEED = 16, 5
POLICY = Augmentation(crop="resized", flip=True, brightness=0.4, contrast=0.4, rotation_degrees=5, noise_std=2)
STAGES = parse_stages("0:64 0.1:160")


def steps(source: Source, total: int, start: Step | None = None) -> Iterator[Step]:
    samples, index = (start.start_samples, start.index) if start else (0, 0)
    return iterate_steps(STAGES.at, GHOST, len(source), total, start_samples=samples, start_index=index)


def digests(
    source: Source,
    total: int,
    rank: int,
    world_size: int,
    feeding: LoaderSettings,
    start: Step | None = None,
    limit: int = 10**9,
) -> dict[int, str]:
    """Number of each ghost batch that is this worker's -> checksum of its images and labels."""
    loader = GhostLoader(
        source,
        POLICY,
        lambda epoch: 96 if epoch < 0.05 else 128,
        SEED,
        (replace(step, rank=rank, world_size=world_size) for step in steps(source, total, start)),
        feeding=feeding,
        largest_image_size=128,
    )
    found: dict[int, str] = {}
    for _, ghosts in loader:
        for ghost in ghosts:
            content = ghost.images.numpy().tobytes() + ghost.labels.numpy().tobytes()
            if not ghost.idle:
                found[ghost.number] = hashlib.sha256(content).hexdigest()
        if len(found) >= limit:
            break
    loader.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--positions", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source, total = open_splits(options.data)[0][1], options.images
    expected = digests(source, total, 0, 1, LoaderSettings())
    equal: dict[str, bool] = {}
    for world_size in (1, 2, 4):
        for processes in (0, 1, 2):
            got: dict[int, str] = {}
            for rank in range(world_size):
                got |= digests(source, total, rank, world_size, LoaderSettings(threads=2, processes=processes))
            equal[f"{world_size} workers, {processes} processes"] = got == expected
    rng, all_steps = random.Random(0), list(steps(source, total))
    resumed = 0
    for _ in range(options.positions):
        start = rng.choice(all_steps)
        tail = digests(source, total, 0, 1, LoaderSettings(threads=2), start, limit=4)
        resumed += min(tail) == start.start_samples // GHOST and all(
            expected[number] == tail[number] for number in tail
        )
    result = {"ghost_batches": len(expected), "equal": equal, "resumed_equal": resumed, "positions": options.positions}
    if options.json:
        print(json.dumps(result))
        return
    print(f"{len(expected)} ghost batches of {GHOST} from {source.name}, images of 96 px, then 128 px")
    for name, same in equal.items():
        print(f"  {name}: {'identical' if same else 'DIFFERENT'}")
    print(f"  resumed at random steps: {resumed} of {options.positions} identical")


if __name__ == "__main__":
    main()
