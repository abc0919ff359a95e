"""The numbers that the benchmark prints, from times that are known."""

from __future__ import annotations

import pytest

from benchmarks.gate import local_ranks
from benchmarks.shared_memory import WANTED, Demo, demo_lines, measure, ratios, read_demo, table_lines

TIMES = {"shared": [1.0, 2.0, 4.0], "gloo": [3.0, 8.0, 20.0], "same": [2.0, 2.0, 2.0]}


def test_ratios_are_taken_within_rounds() -> None:
    assert ratios(TIMES, "gloo") == [3.0, 4.0, 5.0]
    assert ratios(TIMES, "same") == [2.0, 1.0, 0.5]


def test_a_row_of_the_table_has_medians_spread_and_what_was_wanted() -> None:
    *_, row = table_lines({"1x4 torus": {100_000: TIMES}})
    assert row == "| 1x4 torus | 100,000 | 2000.00 | 8000.00 | 4.00 [3.00-5.00] | 2 | 1.00 [0.50-2.00] | 3 |"


def test_the_share_leaves_out_first_steps_and_evaluations() -> None:
    rows = [{"step": step, "communication_seconds": 0.2, "step_seconds": 1.0} for step in (6, 7)]
    rows += [{"step": 8, "communication_seconds": 0.3, "step_seconds": 2.0}, {"step": 9, "top1": 0.5}]
    rows.append({"step": 1, "communication_seconds": 9.0, "step_seconds": 9.0})
    assert read_demo(rows) == (0.2, 0.2, 1.0)
    runs = {"true": [Demo(0.1, 0.02, 0.2), Demo(0.2, 0.02, 0.1)], "false": [Demo(0.4, 0.04, 0.1)] * 2}
    _, without, *left, _ = demo_lines(runs)
    assert without.endswith("40.00 [40.00-40.00] of 100.00 [100.00-100.00] ms, n = 2")
    assert left == [
        "share with over without, by pair: 0.38 [0.25-0.50]",
        "communication with over without, by pair: 0.50 [0.50-0.50]",
        "step with over without, by pair: 1.50 [1.00-2.00]",
    ]


@pytest.mark.slow
def test_four_ranks_measure_every_size() -> None:
    found = local_ranks(4, measure, 1, "2x2", "torus", timeout_seconds=200)[0]
    assert list(found) == list(WANTED)
    assert all(len(seconds) == 1 and seconds[0] > 0 for times in found.values() for seconds in times.values())
