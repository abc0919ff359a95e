"""Ranks that mean different messages learn it at once, with the same line everywhere."""

from __future__ import annotations

import time

import pytest
import torch

from megabatch.comm import agreement
from megabatch.comm.agreement import check_agreement
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.grid import ProcessGrid
from megabatch.errors import CommunicationError
from tests.ranks import run_ranks


def _check(grid: ProcessGrid, message: str) -> str:
    try:
        check_agreement(
            grid,
            call=grid.next_call(),
            task="bucket 0",
            message=message,
            digest_of=message,
            device=torch.device("cpu"),
        )
    except CommunicationError as error:
        return str(error)
    return "agreed"


CASES = [(0, False), (3, False), (3, True)]


def _agree_then_differ(rank: int) -> list[tuple[str, str, float]]:
    return [_case(rank, odd_rank, by_library) for odd_rank, by_library in CASES]


def _case(rank: int, odd_rank: int, by_library: bool) -> tuple[str, str, float]:
    grid = ProcessGrid.build("2x2", timeout_seconds=60)
    with pytest.MonkeyPatch.context() as patch:
        if by_library:
            patch.setattr(agreement, "uses_gloo", lambda group: False)
        same = _check(grid, "1000 float32")
        start = time.monotonic()
        different = _check(grid, "1004 float32" if rank == odd_rank else "1000 float32")
    return same, different, time.monotonic() - start


def test_one_that_differs_is_named_on_every_rank() -> None:
    for rank, answers in enumerate(run_ranks(4, _agree_then_differ)):
        for (odd_rank, _), (same, different, seconds) in zip(CASES, answers, strict=True):
            assert same == "agreed"
            assert different.startswith(f"rank {rank}, bucket 0, agreement on the message: workers disagree")
            assert f"bucket 0 of 1004 float32 on rank {odd_rank}" in different
            assert "bucket 0 of 1000 float32 on ranks" in different
            assert "\n" not in different
            assert seconds < 50  # the timeout is 60


def _differ_unchecked(rank: int) -> str:
    """Without the check: Gloo alone would end the process for a message longer than its receive."""
    grid = ProcessGrid.build("1x2", timeout_seconds=20)
    grid.timeout_seconds = 2
    try:
        AllReducer(grid).run(torch.ones(100 + 4 * rank), task="bucket 5")
    except CommunicationError as error:
        return str(error)
    return "nothing happened"


def test_ranks_that_differ_unnoticed_still_end_in_bounded_time_with_the_reason() -> None:
    for rank, message in enumerate(run_ranks(2, _differ_unchecked)):
        assert message.startswith(f"rank {rank}, bucket 5, row all-reduce: workers disagree about what to reduce")
        assert "100 float32 on rank 0; bucket 5 of 104 float32 on rank 1" in message
