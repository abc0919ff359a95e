"""The fast path and its slow twin give the same sums."""

from __future__ import annotations

import torch

from megabatch.comm.allreduce import all_reduce
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.reference import reference_all_reduce
from tests.ranks import run_ranks


def _compare(rank: int, shape: str) -> list[tuple[str, int]]:
    grid = ProcessGrid.build(shape, timeout_seconds=20)
    different = []
    for algorithm in ALGORITHMS:
        for numel in (0, 1, 5, 101):
            # Whole numbers add without rounding, so the order of addition cannot show.
            own = torch.arange(numel, dtype=torch.float32) * (rank + 1) + 7 * rank
            fast, slow = own.clone(), own.clone()
            all_reduce(fast, grid, algorithm)
            reference_all_reduce(slow, grid, algorithm)
            num = grid.world_size
            exact = torch.arange(numel) * (num * (num + 1) / 2) + 7 * num * (num - 1) / 2
            if not (torch.equal(fast, slow) and torch.equal(slow, exact.float())):
                different.append((algorithm, numel))
    return different


def test_fast_and_slow_agree_exactly() -> None:
    assert run_ranks(6, _compare, "2x3") == [[]] * 6
