"""Memory while 200,000 images are read, and the start on an index of 1.28 million images.

    python -m benchmarks.data_scale [--images 200000] [--entries 1281167] [--json]

Memory is the resident set of the worker and of its loader processes. The index is of shards that exist (as empty space
of the right size): reading it stats every shard and compares sizes and dates, as a run does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from megabatch.data.augment import Augmentation
from megabatch.data.batches import LoaderSettings
from megabatch.data.formats import open_source
from megabatch.data.index import ShardIndex, cached_index
from megabatch.data.loader import GhostLoader
from megabatch.data.randomness import epoch_order
from megabatch.data.shards import TarImages
from megabatch.data.storage import LocalFiles
from megabatch.schedule.batch import iterate_steps

GHOST, IMAGES_PER_SHARD = 64, 1000


def megabytes() -> float:
    """Resident memory of this process and its children, shared pages counted once by proportion."""
    me = psutil.Process()
    return float(sum(process.memory_full_info().pss for process in (me, *me.children(recursive=True)))) / 1e6


def memory(num_images: int, processes: int) -> list[float]:
    """Megabytes at every tenth of the way, over epochs of 20,000 generated images."""
    source = open_source("generated", None, "train", num_images=20_000, image_size=32, memory_limit_bytes=0)
    steps = iterate_steps(lambda _: 512, GHOST, len(source), num_images)
    policy = Augmentation(crop="resized", flip=True)
    feeding = LoaderSettings(threads=2, processes=processes)
    loader = GhostLoader(source, policy, 32, 0, steps, feeding=feeding)
    found, seen, next_look = [], 0, num_images // 10
    for _, ghosts in loader:
        for ghost in ghosts:
            seen += len(ghost.labels)
        if seen >= next_look:
            gc.collect()
            found.append(megabytes())
            next_look += num_images // 10
    loader.close()
    return found


def start_up(entries: int, folder: Path) -> dict[str, float]:
    """Seconds to find the shards, read the cached index and sort the first epoch's order."""
    os.environ["MEGABATCH_DATA"] = str(folder / "cache")
    num_shards = -(-entries // IMAGES_PER_SHARD)
    shards = np.repeat(np.arange(num_shards, dtype=np.uint32), IMAGES_PER_SHARD)[:entries]
    offsets = (np.arange(entries, dtype=np.int64) % IMAGES_PER_SHARD) * 110_592 + 512
    lengths = np.full(entries, 110_000, dtype=np.uint32)
    labels = np.random.default_rng(0).integers(0, 1000, entries)
    paths = [folder / f"train-{number:05}.tar" for number in range(num_shards)]
    for path in paths:
        path.touch()
        os.truncate(path, IMAGES_PER_SHARD * 110_592)
    stamps = LocalFiles(paths).stamps
    cached_index(stamps, str(folder), "train", lambda: ShardIndex(stamps, shards, offsets, lengths, labels))
    began = time.perf_counter()
    storage = LocalFiles(sorted(folder.glob("*.tar")))
    index = cached_index(storage.stamps, str(folder), "train", lambda: _never())
    source = TarImages("train", storage, index, 3, None)
    opened = time.perf_counter() - began
    assert len(source) == entries
    began = time.perf_counter()
    epoch_order(0, 0, entries)
    return {"open_seconds": opened, "order_seconds": time.perf_counter() - began, "shards": num_shards}


def _never() -> ShardIndex:
    raise AssertionError("the cached index was not used")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--entries", type=int, default=1_281_167)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = start_up(options.entries, Path(folder))
    by_threads, by_processes = memory(options.images, 0), memory(options.images, 2)
    if options.json:
        print(json.dumps({"start_up": start, "megabytes": {"threads": by_threads, "processes": by_processes}}))
        return
    print(
        f"start on {options.entries:,} images in {start['shards']:,} shards: {start['open_seconds']:.2f} s to open, "
        f"{start['order_seconds']:.2f} s to sort the first epoch"
    )
    for name, found in (("two threads", by_threads), ("two processes", by_processes)):
        growth = found[-1] - found[0]
        print(
            f"{options.images:,} images by {name}: {found[0]:.1f} MB after a tenth, {found[-1]:.1f} MB at the end "
            f"({growth:+.1f} MB), at most {max(found):.1f} MB"
        )


if __name__ == "__main__":
    main()
