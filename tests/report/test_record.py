"""Files of a run folder: whole or not at all, rows cut at a cursor, torn lines forgiven, damage named in one line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from megabatch.errors import CheckpointError, ConfigError, DataError
from megabatch.report.record import MetricsLog, read_json, read_metrics, write_atomically, write_json


def test_text_and_bytes_are_written_and_nothing_stays_beside(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "caf\u00e9\n")
    write_atomically(tmp_path / "b", b"\x00\xff")
    write_atomically(tmp_path / "a", "second")
    assert (tmp_path / "a").read_bytes() == b"second"
    assert (tmp_path / "b").read_bytes() == b"\x00\xff"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    write_atomically(tmp_path / "a", "old")

    def fail(*_: object) -> None:
        assert (tmp_path / "a").read_text() == "old"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; make room"):
        write_atomically(tmp_path / "a", "new and longer")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_missing_folder_has_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ConfigError, match=f"there is no folder '{place}'; make it, or give another") as caught:
            write_atomically(place / "plan.json", "x")
        assert "resume" not in str(caught.value)
    with pytest.raises(ConfigError, match="is a folder; give the name of a file"):
        write_atomically(tmp_path, "x")


def test_json_is_readable_sorted_and_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"b": 1, "a": [1.5, None]})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": [\n    1.5,\n    null\n  ],\n  "b": 1\n}\n'
    assert read_json(tmp_path / "x.json") == {"a": [1.5, None], "b": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "does not exist"), (b"{", "damaged"), (b"[1]", "a table is needed"), (b"\xff", "damaged")],
)
def test_json_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        read_json(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


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
