"""After the training: every rank's times in one table, and a report that cannot fail the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megabatch.train.aftermath import gather_ranks, report_at_the_end
from megabatch.train.stopwatch import WARM_UP_STEPS, Stopwatch
from tests.ranks import run_ranks
from tests.report.folders import make_run


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
    report_at_the_end(make_run(tmp_path / "a"), said.append)
    assert said == []
    assert (tmp_path / "a" / "report.html").stat().st_size > 1_000_000


@pytest.mark.parametrize("failure", [RuntimeError("boom"), OSError(28, "no room"), MemoryError()])
def test_whatever_fails_is_only_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("megabatch.train.aftermath.write_report", fail)
    said: list[str] = []
    report_at_the_end(tmp_path, said.append)
    assert len(said) == 1
    assert "megabatch report" in said[0]
