"""A real Gloo all-reduce on every rank of the laboratory, checked against the closed form and timed.

python -m benchmarks.netlab --network shared-nic -- python benchmarks/netlab/smoke_allreduce.py
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["all_reduce_seconds", "main"]


def all_reduce_seconds(num_bytes: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` fp32 all-reduces, the slowest rank's; raises when a sum is wrong.

    Rank r contributes (r + 1) * (i mod 7), so every element of the sum is a small integer and exact in fp32.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    ramp = torch.arange(max(1, num_bytes // 4), dtype=torch.float32).remainder_(7)
    expected = ramp * (world * (world + 1) // 2)
    times = []
    for _ in range(repeats):
        values = ramp * (rank + 1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        times.append(time.perf_counter() - start)
        if not torch.equal(values, expected):
            raise AssertionError(f"rank {rank}: the all-reduce of {num_bytes} bytes returned a wrong sum")
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(seconds) for seconds in slowest]


def main() -> None:
    """Join the process group, reduce each size, and let rank 0 print one JSON line per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4, 100_004, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    if len(set(names)) != int(os.environ.get("GROUP_WORLD_SIZE", len(set(names)))):
        raise AssertionError(f"ranks see the hosts {sorted(set(names))}, not one per group")
    for num_bytes in options.bytes:
        times = all_reduce_seconds(num_bytes, options.repeats)
        if dist.get_rank() == 0:
            median = sorted(times)[len(times) // 2]
            print(json.dumps({"bytes": num_bytes, "median_seconds": median, "repeats": len(times)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
