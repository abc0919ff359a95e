import threading
import time
from pathlib import Path

import pytest

from benchmarks.gate import StartGate, make_gate_file


def test_all_ranks_start_at_one_moment_and_none_before_the_last_came(tmp_path: Path) -> None:
    path = tmp_path / "gate"
    make_gate_file(path, 3)
    starts: dict[int, list[float]] = {}
    came: dict[int, list[float]] = {}

    def rank_main(rank: int) -> None:
        gate = StartGate(path, rank, 3, timeout_seconds=20)
        for round_ in range(3):
            time.sleep(0.02 * ((rank + round_) % 3))
            came.setdefault(rank, []).append(time.perf_counter())
            starts.setdefault(rank, []).append(gate.wait())

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for round_ in range(3):
        moments = {starts[rank][round_] for rank in range(3)}
        assert len(moments) == 1
        assert moments.pop() > max(came[rank][round_] for rank in range(3))


def test_a_rank_that_does_not_come_ends_the_wait(tmp_path: Path) -> None:
    path = tmp_path / "gate"
    make_gate_file(path, 2)
    with pytest.raises(TimeoutError, match="not all ranks came to round 1"):
        StartGate(path, 0, 2, timeout_seconds=0.05).wait()
