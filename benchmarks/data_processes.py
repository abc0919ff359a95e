"""Threads or processes: the same images through the loader by two of either kind, taking turns.

    python -m benchmarks.data_processes --photos FOLDER [--rounds 6] [--epochs 6] [--json]

CPU time is that of the worker and of its loader processes; starting them is left out, as a run does it once.
The consumer does nothing else, so the wall time is that of the loader alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.data_peers import BATCH, POLICY, SIZE, Photographs, read_photographs
from megabatch.data.batches import LoaderSettings
from megabatch.data.loader import GhostLoader
from megabatch.schedule.batch import iterate_steps

KINDS = {
    "one thread": LoaderSettings(threads=1),
    "two threads": LoaderSettings(threads=2),
    "one process": LoaderSettings(processes=1),
    "two processes": LoaderSettings(processes=2),
}


def cpu_seconds() -> float:
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


def rates(photographs: Photographs, feeding: LoaderSettings, epochs: int) -> tuple[float, float]:
    """Images per CPU second and per wall second, after the first batches."""
    total = len(photographs) * epochs // BATCH * BATCH
    steps = iterate_steps(lambda _: BATCH, BATCH, len(photographs), total)
    loader = GhostLoader(photographs, POLICY, SIZE, 0, steps, feeding=feeding)
    count, cpu, wall, skip = 0, 0.0, 0.0, 8
    for number, (_, ghosts) in enumerate(loader):
        if number == skip:
            cpu, wall = cpu_seconds(), time.perf_counter()
        got = sum(len(ghost.labels) for ghost in ghosts)
        count += got if number >= skip else 0
    result = count / (cpu_seconds() - cpu), count / (time.perf_counter() - wall)
    loader.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="folder of parquet files with full-size photographs")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    photographs = read_photographs(options.photos)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    for _ in range(options.rounds):
        for name, feeding in KINDS.items():
            found[name].append(rates(photographs, feeding, options.epochs))
    table = {}
    for name, values in found.items():
        cpu, wall = [value[0] for value in values], [value[1] for value in values]
        table[name] = {
            "per_cpu_second": median(cpu),
            "per_cpu_second_range": [min(cpu), max(cpu)],
            "per_second": median(wall),
            "per_second_range": [min(wall), max(wall)],
        }
    if options.json:
        print(json.dumps({"rounds": options.rounds, "kinds": table}))
        return
    for name, row in table.items():
        print(
            f"{name:14} {row['per_cpu_second']:6.0f} images per CPU second "
            f"[{row['per_cpu_second_range'][0]:.0f} - {row['per_cpu_second_range'][1]:.0f}], "  # type: ignore[index]
            f"{row['per_second']:6.0f} per second "
            f"[{row['per_second_range'][0]:.0f} - {row['per_second_range'][1]:.0f}]"  # type: ignore[index]
        )


if __name__ == "__main__":
    main()
