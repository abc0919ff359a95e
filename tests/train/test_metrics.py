"""Parts of a step add up and the first steps do not count; a report cannot fail the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megabatch.train import metrics
from megabatch.train.metrics import PARTS, WARM_UP_STEPS, Stopwatch, gather_ranks, say_result, write_page
from tests.ranks import run_ranks
from tests.report.folders import make_run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the first element."""
    now = [100.0]
    monkeypatch.setattr("megabatch.train.metrics.time.perf_counter", lambda: now[0])
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
    for _ in range(metrics.WARM_UP_STEPS):
        one_step(watch, clock, forward=1000.0)
        assert all(math.isnan(value) for value in watch.means())
    for forward in (2.0, 4.0):
        one_step(watch, clock, forward)
    assert watch.num_steps == 2
    assert dict(zip(PARTS, watch.means(), strict=True))["forward"] == 3.0


def test_communication_that_is_known_late_counts_where_its_step_does(clock: list[float]) -> None:
    watch = Stopwatch(False)
    for _ in range(metrics.WARM_UP_STEPS + 2):
        watch.begin()
        watch.expose_late(3.0, watch.end())
    assert dict(zip(PARTS, watch.means(), strict=True))["communication"] == 3.0


def test_a_device_that_runs_behind_its_host_leaves_its_parts_unknown(clock: list[float]) -> None:
    watch = Stopwatch(False)
    for _ in range(5):
        one_step(watch, clock, forward=2.0)
    means = dict(zip(PARTS, watch.means(), strict=True))
    assert (means["data"], means["communication"]) == (1.0, 1.5)
    table = gather_ranks(watch, ["host"])
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


def _gather(rank: int) -> dict[str, Any]:
    watch = Stopwatch(True)
    for _ in range(WARM_UP_STEPS + 2):
        watch.begin()
        watch.seconds["forward"] = float(rank + 1)
        watch.end()
    return gather_ranks(watch, ["a", "a", "b"])


def test_all_ranks_get_the_same_table() -> None:
    tables = run_ranks(3, _gather)
    assert tables[0] == tables[1] == tables[2]
    assert [(row["host"], row["forward_seconds"]) for row in tables[0]["ranks"]] == [("a", 1.0), ("a", 2.0), ("b", 3.0)]
    assert tables[0]["num_steps"] == 2


def test_the_page_is_there_and_nothing_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    write_page(make_run(tmp_path / "a"), said.append)
    assert said == []
    assert (tmp_path / "a" / "report.html").stat().st_size > 100_000


def test_the_end_of_a_run_says_what_can_be_done_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "my runs")
    say_result(json.loads((folder / "summary.json").read_text()), folder)
    said = capsys.readouterr().out
    assert f"megabatch evaluate '{folder}'  (adds the confusion matrix and the mistakes to the report)\n" in said
    assert f"megabatch predict '{folder}' IMAGES...\n" in said


def test_unreadable_images_are_counted_once_and_their_lists_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a")
    summary = json.loads((folder / "summary.json").read_text())
    say_result(summary, folder)
    assert "shown as grey" not in capsys.readouterr().out
    one, other = ({"set": "x train", "index": index, "name": "n", "reason": "r"} for index in (3, 5))
    (folder / "broken.0.jsonl").write_text(json.dumps(one) + "\n")
    say_result(summary, folder)
    assert f"1 image was replaced or shown as grey; listed with the reasons in {folder / 'broken.0.jsonl'}" in (
        capsys.readouterr().out
    )
    (folder / "broken.1.jsonl").write_text(json.dumps(one) + "\n" + json.dumps(other) + "\n" + "cut of")
    say_result(summary, folder)
    assert f"2 images were replaced or shown as grey; listed with the reasons in {folder / 'broken.*.jsonl'}" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("failure", [RuntimeError("boom"), OSError(28, "no room"), MemoryError()])
def test_whatever_fails_is_only_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("megabatch.train.metrics.write_report", fail)
    said: list[str] = []
    write_page(tmp_path, said.append)
    assert len(said) == 1
    assert "megabatch report" in said[0]
