"""Notes left by failing ranks, and the line made of them."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore  # type: ignore[attr-defined]

from megabatch.comm.rollcall import Note, explain, in_words, roll_call

NOTE = Note(0, "bucket 3", "row reduce-scatter", 7, "1000 float32", 1, "rank 1 closed its connection")


def _note(rank: int, **changes: object) -> Note:
    return dataclasses.replace(NOTE, rank=rank, **changes)  # type: ignore[arg-type]


def test_every_rank_hears_every_other_and_who_is_missing() -> None:
    store = HashStore()
    alive = [0, 2, 3]
    with ThreadPoolExecutor(3) as pool:
        heard = list(pool.map(lambda rank: roll_call(store, _note(rank), 4, settle_seconds=0.5), alive))
    for rank, notes in zip(alive, heard, strict=True):
        assert sorted(notes) == alive
        line = explain(_note(rank), notes, 4)
        assert f"rank {rank}, bucket 3, row reduce-scatter: rank 1 closed its connection" in line
        assert "not heard from: rank 1;" in line


def test_a_full_roll_call_does_not_wait() -> None:
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        heard = list(pool.map(lambda rank: roll_call(store, _note(rank), 4, settle_seconds=30), range(4)))
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
        early = pool.submit(roll_call, store, _note(1), 4, settle_seconds=20, limit_seconds=20)
        assert sorted(roll_call(store, _note(0), 4, settle_seconds=1.0)) == [0, 1]
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
    assert roll_call(stuck, NOTE, 4, settle_seconds=0.1, limit_seconds=0.3) == {0: NOTE}
    assert time.monotonic() - start < 10
    stuck.released.set()
    notes = roll_call(_BrokenStore(), NOTE, 4)
    assert explain(NOTE, notes, 4) == (
        "rank 0, bucket 3, row reduce-scatter: rank 1 closed its connection; "
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
    assert "not heard from: ranks 2, 3, 4, 5, 6, 7, 8, 9 and 4086 more;" in line


def test_complaints_of_the_backend_in_words() -> None:
    closed = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:19329. \U0001f3d6")
    assert in_words(closed, 3, 30) == "rank 3 closed its connection"
    late = RuntimeError("Timed out waiting 30000ms for recv operation to complete")
    assert in_words(late, 3, 30) == "rank 3 did not answer within 30 s"
    again = RuntimeError("Application timeout caused pair closure")
    assert in_words(again, 3, 30) == "this worker had already given up"
    assert in_words(RuntimeError("odd \u2603\nmore"), None, 30) == "no answer from another rank (odd )"
