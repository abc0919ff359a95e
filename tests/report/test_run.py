"""Files of a run folder: damage named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megabatch.errors import DataError
from megabatch.report.run import read_json, read_run, read_runs, setting
from tests.report.folders import make_hostile_run, make_run


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


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "mine"))
    assert (run.name, run.world_size, run.grid_text, run.algorithm) == ("mine", 4, "2x2", "torus")
    assert run.is_finished
    assert run.problems == ()
    assert run.metrics.num_rows == 100
    assert setting(run, "train.ghost_batch_size") == 64
    assert setting(run, "train.nothing.deeper") is None


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", finished=False))
    assert not run.is_finished
    assert run.world_size == 4


def test_a_hostile_run_is_read_and_its_damage_named(tmp_path: Path) -> None:
    run = read_run(make_hostile_run(tmp_path / "a"))
    assert run.summary == {}
    assert run.metrics.num_rows == 59 + 2  # what names a step counts as a row
    said = "; ".join(run.problems)
    assert "summary.json is not whole JSON" in said
    assert "plan.json is not whole JSON" in said
    assert "lines of metrics.jsonl" in said


@pytest.mark.parametrize("content", [None, "empty", "junk"])
def test_what_is_no_run_is_one_line(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "x"
    if content:
        folder.mkdir()
    if content == "junk":
        (folder / "metrics.jsonl").write_text("junk\n")
    with pytest.raises(DataError, match="give the folder of a run") as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


def test_runs_of_equal_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "same", num_steps=3) for parent in ("a", "b", "c")]
    assert [run.name for run in read_runs(folders)] == ["same", "same (2)", "same (3)"]
