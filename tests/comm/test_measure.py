"""Measuring a grid of real ranks: the same numbers everywhere, and a slow line, shared links and dead ranks seen."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from megabatch.comm import measure
from megabatch.comm.calibration import calibration_text
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.measure import AxisMeasurement, calibrate, from_main_rank, gather, measure_axis, race
from megabatch.comm.p2p import Link
from megabatch.errors import CommunicationError
from tests.ranks import run_ranks


def slow_down(patch: pytest.MonkeyPatch, ranks: set[int], bytes_per_second: float) -> None:
    """Let messages between two of `ranks` take their time, as behind a slow cable."""
    send = Link.send

    def slow_send(self: Link, part: torch.Tensor, to: int, tag: int) -> None:
        if {self.ranks[self.position], self.ranks[to]} <= ranks:
            time.sleep(part.numel() * part.element_size() / bytes_per_second)
        send(self, part, to, tag)

    patch.setattr(Link, "send", slow_send)


def _measure(rank: int) -> dict[str, Any]:
    grid = ProcessGrid.build("2x2", timeout_seconds=30, shared_memory=False)
    told: dict[str, Any] = {"table": gather(grid, [float(rank), -1.5 * rank])}
    told["text"] = from_main_rank(grid, f"gr\u00fcn {rank}")
    told["empty"] = from_main_rank(grid, "" if rank == 0 else "x")
    start = time.monotonic()
    told["calibration"] = calibration_text(calibrate(grid, budget_seconds=0.5))
    told["seconds"] = time.monotonic() - start
    with pytest.MonkeyPatch.context() as patch:
        # Rank 2 is late in the second of two runs: all ranks must hear of it.
        naps = iter([0.0, 0.3] * 2)
        told["race"] = race(grid, {"a": lambda: None, "b": lambda: time.sleep(next(naps) if rank == 2 else 0)}, 2)
        slow_down(patch, {1, 3}, 1e6)
        told["columns"] = measure_axis(grid, 0, budget_seconds=0.2)
        # As if the ranks sat on two hosts: the first line runs alone once more.
        patch.setattr(grid, "hosts", ("a", "a", "b", "b"))
        told["two hosts"] = [measure_axis(grid, axis, budget_seconds=0.2) for axis in (0, 1)]
    told["calls"] = grid.next_call()
    return told


def test_every_rank_ends_with_the_same_numbers() -> None:
    answers = run_ranks(4, _measure)
    for told in answers:
        seconds = told.pop("seconds")
        assert seconds < 60  # the budget was 0.5; how well it is kept depends on the machine
        assert told == {key: value for key, value in answers[0].items() if key != "seconds"}
    told = answers[0]
    assert told["table"] == [[0.0, -0.0], [1.0, -1.5], [2.0, -3.0], [3.0, -4.5]]
    assert told["text"] == "gr\u00fcn 0"
    assert told["empty"] == ""
    assert [len(told["race"][name]) for name in "ab"] == [2, 2]
    assert told["race"]["b"][1] > 0.3
    columns: AxisMeasurement = told["columns"]
    assert columns.lines == ((0, 2), (1, 3))
    # 64 KiB and more through 1 MB/s: the sleep alone bounds what can be measured.
    assert columns.bytes_per_second[1] < 1.2e6
    assert columns.solo_bytes_per_second == 0
    between, within = told["two hosts"]
    assert 0 < between.solo_bytes_per_second <= 2 * between.bytes_per_second[0]
    assert within.solo_bytes_per_second == 0


def test_the_calibration_has_what_the_price_needs() -> None:
    (text, *_) = run_ranks(2, _calibrate_row)
    assert '"grid": "1x2"' in text
    assert '"size": 1' in text
    assert '"backend": "gloo"' in text
    assert '"algorithm": "backend"' in text


def _calibrate_row(rank: int) -> str:
    calibration = calibrate(ProcessGrid.build("1x2", timeout_seconds=30), budget_seconds=0.2)
    column, row = calibration.axes
    assert (column.size, row.size) == (1, 2)
    assert 0 < row.latency_seconds < 30
    assert row.message_overhead_seconds <= row.latency_seconds
    assert calibration.links(calibration.shape)
    return calibration_text(calibration)


def test_the_cost_of_an_axis_is_that_of_its_worst_line() -> None:
    lines = ((0, 2), (1, 3))
    measured = AxisMeasurement(lines, (1e-3, 2e-3), (40e6, 10e6), 5e-3, 120e6, (False, False))
    cost = measured.cost("column")
    # Line 0 alone is three times as fast as together with line 1, so three ranks' worth of traffic share a link.
    assert (cost.name, cost.size, cost.latency_seconds, cost.ranks_per_link) == ("column", 2, 2e-3, 3.0)
    assert cost.rate(alone=False) == pytest.approx(10e6)
    assert cost.bytes_per_second == pytest.approx(30e6)
    assert cost.message_overhead_seconds == 2e-3  # never above the latency, which contains it
    assert AxisMeasurement(lines, (1e-3, 2e-3), (40e6, 10e6), 0, 0, (False, False)).cost("column").ranks_per_link == 1


def test_rates_are_what_further_bytes_add_to_a_step() -> None:
    assert measure._rates([1.0, 1.0], [0.2, 1.0], 1000, 2) == pytest.approx([2 * 1000 / 0.8, 2 * 1000 / 0.1])


def _lose_a_rank(rank: int) -> str:
    grid = ProcessGrid.build("2x2", timeout_seconds=3)
    measure_axis(grid, 1, budget_seconds=0.05)
    if rank == 3:
        return ""
    try:
        measure_axis(grid, 1, budget_seconds=0.05)
        measure_axis(grid, 0, budget_seconds=0.05)
    except CommunicationError as error:
        return str(error)
    return "measured"


def test_a_missing_rank_is_named_in_bounded_time() -> None:
    for rank, told in enumerate(run_ranks(4, _lose_a_rank)[:3]):
        assert told.startswith(f"rank {rank}, ")
        assert "rank 3" in told
        assert "\n" not in told
