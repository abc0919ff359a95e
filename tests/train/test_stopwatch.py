"""Parts of a step: laps add up, exposed communication leaves backward, the first steps do not count."""

from __future__ import annotations

import json
import math

import pytest

from megabatch.train import stopwatch
from megabatch.train.stopwatch import PARTS, Stopwatch, ranks_table


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the first element."""
    now = [100.0]
    monkeypatch.setattr("megabatch.train.stopwatch.time.perf_counter", lambda: now[0])
    return now


def one_step(watch: Stopwatch, now: list[float], forward: float) -> None:
    watch.begin()
    for part, seconds in (("data", 1.0), ("forward", forward), ("backward", 4.0)):
        now[0] += seconds
        watch.lap(part)
    now[0] += 50.0
    watch.skip()  # statistics, logging: no part
    watch.expose(1.5)
    now[0] += 0.25
    watch.lap("optimizer")
    watch.end()


def test_laps_go_to_their_parts_and_exposed_time_leaves_backward(clock: list[float]) -> None:
    watch = Stopwatch(True)
    one_step(watch, clock, forward=2.0)
    assert watch.seconds == {
        "data": 1.0,
        "forward": 2.0,
        "backward": 2.5,
        "communication": 1.5,
        "optimizer": 0.25,
    }


def test_the_first_steps_are_left_out_of_the_means(clock: list[float]) -> None:
    watch = Stopwatch(True)
    for _ in range(stopwatch.WARM_UP_STEPS):
        one_step(watch, clock, forward=1000.0)
        assert all(math.isnan(value) for value in watch.means())
    for forward in (2.0, 4.0):
        one_step(watch, clock, forward)
    assert watch.num_steps == 2
    assert dict(zip(PARTS, watch.means(), strict=True))["forward"] == 3.0


def test_a_device_that_runs_behind_its_host_leaves_its_parts_unknown(clock: list[float]) -> None:
    watch = Stopwatch(False)
    for _ in range(5):
        one_step(watch, clock, forward=2.0)
    means = dict(zip(PARTS, watch.means(), strict=True))
    assert (means["data"], means["communication"]) == (1.0, 1.5)
    table = ranks_table([watch.means()], ["host"], 2)
    assert json.loads(json.dumps(table, allow_nan=False))["ranks"] == [
        {
            "rank": 0,
            "host": "host",
            "data_seconds": 1.0,
            "forward_seconds": None,
            "backward_seconds": None,
            "communication_seconds": 1.5,
            "optimizer_seconds": None,
        }
    ]


def test_exposed_time_longer_than_backward_leaves_no_negative_part() -> None:
    watch = Stopwatch(True)
    watch.begin()
    watch.expose(3.0)
    watch.end()
    assert (watch.seconds["backward"], watch.seconds["communication"]) == (0.0, 3.0)
