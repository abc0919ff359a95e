"""Rows cut at a cursor, torn lines forgiven, damage named in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megabatch.errors import DataError
from megabatch.report.metrics_log import MetricsLog, read_metrics


def rows_in(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_rows_are_there_at_once_and_a_resumed_run_cuts_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    assert log.num_bytes == 0
    cursors = []
    for step in range(1, 6):
        log.append({"step": step, "loss": 0.5})
        cursors.append(log.num_bytes)
        assert path.stat().st_size == log.num_bytes
        assert rows_in(path) == list(range(1, step + 1))
    # The first run is killed here, without closing. A checkpoint remembers step 3.
    resumed = MetricsLog(path, keep_bytes=cursors[2])
    assert rows_in(path) == [1, 2, 3]
    assert resumed.num_bytes == cursors[2]
    resumed.append({"step": 40})
    assert rows_in(path) == [1, 2, 3, 40]
    resumed.close()
    log.close()
    MetricsLog(path).close()  # a new run begins with an empty file
    assert rows_in(path) == []


def test_a_writer_that_was_held_up_cannot_disturb_the_one_that_took_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    held_up = MetricsLog(path)
    held_up.append({"step": 1})
    held_up.append({"step": 2, "seconds": 0.25})
    of_today = MetricsLog(path, keep_bytes=held_up.num_bytes)
    of_today.append({"step": 3})
    held_up.append({"step": 3, "seconds": 0.5})
    of_today.append({"step": 4})
    held_up.close()
    of_today.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m")
    log.append({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300})
    log.close()
    assert json.loads((tmp_path / "m").read_text()) == {"step": 1, "a": None, "b": None, "c": None, "d": 1e300}


def test_a_torn_last_line_is_passed_over_when_reading(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"upda')
    assert rows_in(path) == [1, 2]
    path.write_bytes(b'{"step": 1}\n{"step": 2}')  # whole, but nobody can know
    assert rows_in(path) == [1]


def test_a_torn_last_line_is_not_continued_when_writing_goes_on(tmp_path: Path) -> None:
    """A machine that lost power may have kept less of the log than the checkpoint, forced to disk, remembers."""
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n{"upda')
    log = MetricsLog(path, keep_bytes=500)
    log.append({"step": 3})
    log.close()
    assert rows_in(path) == [1, 3]


def test_metrics_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; give the folder of a run"):
        list(read_metrics(tmp_path / "metrics.jsonl"))
    for bad in ("nonsense", "[1]", "\x00"):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{bad}\n{{"step": 2}}\n', encoding="utf-8")
        with pytest.raises(DataError, match="is damaged in line 2"):
            list(read_metrics(tmp_path / "metrics.jsonl"))
    with pytest.raises(DataError, match="cannot be read"):
        list(read_metrics(tmp_path))
