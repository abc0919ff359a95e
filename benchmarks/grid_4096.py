"""A process grid of 4096 ranks: what one rank pays in time and memory to build it, and that this does not grow.

    python -m benchmarks.grid_4096 [--rounds 5] [--json FILE]

torch's fake process group plays the other ranks: it answers every collective at once, so what is left is this rank's
own work. A rank of a square grid is a member of two groups of sqrt(world) ranks; groups of the whole world are not
made. Every world is measured in a process of its own, worlds take turns; memory is what the process gained.

What the fake group cannot show - the exchange of shape and host names through the job's store, one write and one read
per rank, and at rank 0 one read of `world` entries - is left out (`check_consistency=False`) and
measured beside it: rank 0's side of the exchange with a real store that holds `world` entries.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing as mp
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["GridCost", "build_once", "main", "table_lines"]

WORLDS = (16, 256, 1024, 4096)


@dataclass(frozen=True)
class GridCost:
    """One rank's cost of a square grid over `world_size` ranks."""

    world_size: int
    build_seconds: float
    memory_bytes: int
    groups: int
    consistency_seconds: float


def build_once(world_size: int) -> GridCost:
    """Build the grid of the middle rank of a fake world in this process."""
    import psutil
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megabatch.comm.grid import ProcessGrid

    side = math.isqrt(world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=world_size // 2, world_size=world_size)
    process = psutil.Process()
    gc.collect()
    resident_bytes = process.memory_info().rss
    start = time.perf_counter()
    grid = ProcessGrid.build((side, world_size // side), check_consistency=False)
    seconds = time.perf_counter() - start
    memory_bytes = process.memory_info().rss - resident_bytes
    assert grid.axis_ranks(0)[grid.axis_position(0)] == grid.rank == world_size // 2
    groups = sum(size > 1 for size in grid.shape.sizes)
    dist.destroy_process_group()
    return GridCost(world_size, seconds, memory_bytes, groups, _consistency_seconds(world_size))


def _consistency_seconds(world_size: int) -> float:
    """Rank 0's part of the consistency check, all others having written their entries already."""
    from torch._C._distributed_c10d import HashStore

    from megabatch.comm.grid import check_grid_consistency
    from megabatch.comm.shape import GridShape

    store = HashStore()
    side = math.isqrt(world_size)
    shape = GridShape((side, world_size // side))
    for rank in range(1, world_size):
        store.set(f"entry {rank}", json.dumps([shape.text, f"host-{rank // 4}"]))
    start = time.perf_counter()
    check_grid_consistency(store, 0, world_size, shape, "host-0", 30.0)
    return time.perf_counter() - start


def table_lines(costs: Sequence[GridCost]) -> list[str]:
    """One row per world: medians and spread over its rounds."""
    lines = [
        "| world | grid | build, ms per rank | memory, KiB per rank | groups | rank 0 reading all entries, ms | n |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for world_size in sorted({cost.world_size for cost in costs}):
        own = [cost for cost in costs if cost.world_size == world_size]
        side = math.isqrt(world_size)
        build = _spread([1e3 * cost.build_seconds for cost in own])
        memory = _spread([cost.memory_bytes / 1024 for cost in own])
        consistency = _spread([1e3 * cost.consistency_seconds for cost in own])
        columns = [str(world_size), f"{side}x{world_size // side}", build, memory, str(own[0].groups), consistency]
        lines.append(f"| {' | '.join([*columns, str(len(own))])} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.testing._internal.distributed.fake_pg", "megabatch.comm.grid"])
    costs = []
    for _ in range(options.rounds):
        for world_size in WORLDS:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                costs.append(pool.submit(build_once, world_size).result(timeout=300))
    print(*table_lines(costs), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
