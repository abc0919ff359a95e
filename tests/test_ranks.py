"""The helper that starts ranks: results in order of rank, and a failure that names the rank and what it did."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailureError, run_ranks


def add_up(rank: int, offset: int) -> tuple[int, int, float, str]:
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    return rank, dist.get_world_size(), total.item(), os.environ["LOCAL_RANK"]


def raise_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one does not like this")
    dist.barrier()  # the others wait for it: they must not keep the test waiting


def die_on_one(rank: int) -> int:
    if rank == 1:
        os._exit(7)
    return rank


def hang_on_one(rank: int) -> int:
    if rank == 1:
        time.sleep(60)
    return rank


def test_ranks_are_joined_and_results_come_in_order() -> None:
    assert run_ranks(3, add_up, 10) == [(0, 3, 33.0, "0"), (1, 3, 33.0, "1"), (2, 3, 33.0, "2")]
    assert run_ranks(1, add_up, 5) == [(0, 1, 5.0, "0")]


def test_a_rank_that_raises_is_named_with_its_own_traceback() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailureError, match=r"rank 1: Traceback[^$]*rank one does not like this"):
        run_ranks(2, raise_on_one)
    assert time.monotonic() - began < 30


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailureError, match="rank 1: the process died without a word"):
        run_ranks(2, die_on_one)


def test_a_rank_that_hangs_is_named_after_the_time_limit() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailureError, match=r"^rank 1: did not finish within 3 s$"):
        run_ranks(2, hang_on_one, timeout_seconds=3)
    assert time.monotonic() - began < 30
