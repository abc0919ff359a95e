"""Notes left by failing ranks and the line made of them; ranks that mean different messages learn it at once."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megabatch.comm.allreduce import AllReducer
from megabatch.comm.failures import (
    Note,
    check_consistency,
    collect_notes,
    explain,
    fail,
    is_lost_contact,
    report_lost_peer,
)
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.p2p import PeerLostError
from megabatch.comm.shape import GridShape
from megabatch.errors import CommunicationError
from tests.ranks import run_ranks

NOTE = Note(0, "bucket 3", "row reduce-scatter", 7, "1000 float32", "the connection to rank 1 broke")


def _note(rank: int, **changes: object) -> Note:
    return dataclasses.replace(NOTE, rank=rank, **changes)  # type: ignore[arg-type]


def test_every_rank_hears_every_other_and_who_is_missing() -> None:
    store = HashStore()
    alive = [0, 2, 3]
    with ThreadPoolExecutor(3) as pool:
        heard = list(pool.map(lambda rank: collect_notes(store, _note(rank), 4, settle_seconds=0.5), alive))
    for rank, notes in zip(alive, heard, strict=True):
        assert sorted(notes) == alive
        line = explain(_note(rank), notes, 4)
        assert f"rank {rank}, bucket 3, row reduce-scatter: the connection to rank 1 broke" in line
        assert "not heard from: rank 1;" in line


def test_a_report_of_all_ranks_does_not_wait() -> None:
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        heard = list(pool.map(lambda rank: collect_notes(store, _note(rank), 4, settle_seconds=30), range(4)))
    assert all(len(notes) == 4 for notes in heard)


class _LeavingStore(HashStore):
    """A store that leaves with the rank that holds it: after so many notes were read nothing answers any more."""

    def __init__(self) -> None:
        super().__init__()
        self.left = threading.Event()

    def add(self, key: str, amount: int) -> int:
        if self.left.is_set():
            raise RuntimeError("Connection reset by peer")
        return super().add(key, amount)


def test_notes_are_read_as_they_come_for_who_holds_the_store_may_leave_first() -> None:
    store = _LeavingStore()
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(collect_notes, store, _note(1), 4, settle_seconds=20, limit_seconds=20)
        assert sorted(collect_notes(store, _note(0), 4, settle_seconds=1.0)) == [0, 1]
        store.left.set()
        assert sorted(early.result()) == [0, 1]


class _StuckStore(HashStore):
    """A store whose host was lost: nothing comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.released.wait(30)


class _BrokenStore(HashStore):
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def test_a_lost_store_costs_bounded_time_and_leaves_the_own_note() -> None:
    stuck = _StuckStore()
    start = time.monotonic()
    assert collect_notes(stuck, NOTE, 4, settle_seconds=0.1, limit_seconds=0.3) == {0: NOTE}
    assert time.monotonic() - start < 10
    stuck.released.set()
    notes = collect_notes(_BrokenStore(), NOTE, 4)
    assert explain(NOTE, notes, 4) == (
        "rank 0, bucket 3, row reduce-scatter: the connection to rank 1 broke; "
        "look at the log of that worker, then restart the job"
    )


def test_ranks_that_reduce_different_things_are_told_apart() -> None:
    notes = {0: _note(0), 1: _note(1, message="1004 float32"), 2: _note(2), 3: _note(3, call=8, message="9 float32")}
    line = explain(notes[2], notes, 4)
    assert "workers disagree" in line
    assert "bucket 3 of 1000 float32 on ranks 0, 2; bucket 3 of 1004 float32 on rank 1" in line
    assert "9 float32" not in line  # another call: no contradiction
    assert "\n" not in line


def test_all_alive_means_somebody_was_late() -> None:
    notes = {rank: _note(rank) for rank in range(3)}
    assert "all workers live, so raise the timeout" in explain(NOTE, notes, 3)


def test_a_large_loss_is_cut_short() -> None:
    line = explain(NOTE, {0: NOTE, 1: _note(1)}, 4096)
    assert "not heard from: ranks 2 to 4095;" in line


def _grid() -> ProcessGrid:
    return ProcessGrid(GridShape((2, 2)), 0, [None, None], timeout_seconds=30)


def test_a_lost_peer_in_words() -> None:
    def words(peer: int | None, timed_out: bool) -> str:
        lost = PeerLostError(peer, timed_out=timed_out)
        error = report_lost_peer(_grid(), lost, task="bucket 1", phase="row all-gather", call=4, message="10 float32")
        return str(error).partition("; ")[0]

    assert words(3, False) == "rank 0, bucket 1, row all-gather: the connection to rank 3 broke"
    assert words(3, True) == "rank 0, bucket 1, row all-gather: rank 3 did not answer within 30 s"
    assert words(None, True) == "rank 0, bucket 1, row all-gather: another rank did not answer within 30 s"


def test_a_broken_grid_stays_broken_and_says_why() -> None:
    grid = _grid()
    first = fail(grid, Note(0, "bucket 1", "row all-gather", 4, "10 float32", "the connection to rank 1 broke"))
    later = fail(grid, Note(0, "bucket 2", "row all-gather", 5, "10 float32", "something else"))
    assert str(first) == str(later)
    assert str(first).startswith("rank 0, bucket 1, row all-gather: the connection to rank 1 broke;")
    for use in (grid.check_usable, grid.next_call):
        with pytest.raises(CommunicationError, match="bucket 1, row all-gather"):
            use()


def test_a_thread_that_hears_only_an_echo_lets_the_one_that_knows_speak() -> None:
    """One thread's time runs out; that closes the connections of another, which may be the first to report."""
    grid = _grid()
    facts = {"phase": "row all-gather", "call": 4, "message": "10 float32"}
    with ThreadPoolExecutor(2) as pool:
        echo = pool.submit(
            report_lost_peer,
            grid,
            PeerLostError(2, timed_out=False),
            task="bucket 2",
            **facts,  # type: ignore[arg-type]
        )
        time.sleep(0.02)
        cause = pool.submit(
            report_lost_peer,
            grid,
            PeerLostError(3, timed_out=True),
            task="bucket 1",
            **facts,  # type: ignore[arg-type]
        )
        assert str(echo.result()) == str(cause.result())
    assert "bucket 1, row all-gather: rank 3 did not answer" in str(cause.result())


def _check(grid: ProcessGrid, message: str) -> str:
    try:
        check_consistency(
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
            patch.setattr(grid, "on_gloo", lambda axes: False)
        same = _check(grid, "1000 float32")
        start = time.monotonic()
        different = _check(grid, "1004 float32" if rank == odd_rank else "1000 float32")
    return same, different, time.monotonic() - start


def test_one_that_differs_is_named_on_every_rank() -> None:
    for rank, answers in enumerate(run_ranks(4, _agree_then_differ)):
        for (odd_rank, _), (same, different, seconds) in zip(CASES, answers, strict=True):
            assert same == "agreed"
            assert different.startswith(f"rank {rank}, bucket 0, consistency check: workers disagree")
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


def test_lost_contact_is_told_from_other_errors() -> None:
    gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert is_lost_contact(gloo)
    assert is_lost_contact(CommunicationError("rank 1 is gone"))
    assert not is_lost_contact(RuntimeError("shapes do not match"))
    assert not is_lost_contact(ValueError("gloo"))
