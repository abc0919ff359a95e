"""Who took part: counted, named, and read with the distrust that a stranger's file deserves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megabatch.report.figure import Figure, Missing
from megabatch.report.membership import MAX_NAMES, change_rows, changes, membership
from megabatch.report.page import all_figures, write_report
from megabatch.report.run import MAX_CHANGES, read_run, read_runs
from megabatch.report.sections import conditions_section
from tests.report.folders import HOSTILE, add_membership, change, make_hostile_run, make_run


def elastic_run(folder: Path) -> Path:
    return add_membership(make_run(folder), change(20, 3, lost=1), change(50, 1, lost=2), change(60, 4, joined=3))


def figure_of(folder: Path) -> Figure:
    found = membership([read_run(folder)])
    assert isinstance(found, Figure)
    return found


def test_the_figure_shows_how_many_workers_made_each_step(tmp_path: Path) -> None:
    figure = figure_of(elastic_run(tmp_path / "a"))
    workers, lost, joined = figure.series
    assert (workers.x, workers.y) == ((0, 20, 50, 60, 100), (4, 3, 1, 4, 4))
    assert workers.mark == "steps"
    assert (lost.x, lost.y) == ((20, 50), (3, 1))
    assert (joined.x, joined.y) == ((60,), (4,))
    assert (lost.labels, joined.labels) == (("node0-100", "2 workers"), ("3 workers",))
    assert figure.title == "3 workers lost and 3 joined, in 1.5 s of waiting together"


def test_a_run_that_was_resumed_on_other_workers_between_two_changes(tmp_path: Path) -> None:
    run = add_membership(make_run(tmp_path / "a"), change(20, 3, lost=1), change(50, 1, lost=1))
    workers = figure_of(run).series[0]
    assert (workers.x, workers.y) == ((0, 20, 50, 50, 100), (4, 3, 2, 1, 1))


def test_the_table_names_everybody(tmp_path: Path) -> None:
    run = read_run(elastic_run(tmp_path / "a"))
    head, rows = change_rows(run)
    assert head == ["after step", "time (UTC)", "workers", "grid", "lost", "joined", "joined with", "seconds"]
    assert rows[0] == ["20", "2027-01-15 08:00:00", "4 to 3", "1x3", "node0-100-ab", "-", "-", "0.50"]
    assert rows[2][4:6] == ["-", "node0-200-cd, node0-201-cd, node0-202-cd"]
    assert rows[2][6] == "node0, EPYC, torch 2.13, 1 threads"  # the same for all three
    page = conditions_section([run])
    assert "Changes of the workers" in page
    assert "node0-202-cd" in page


def test_what_a_worker_does_not_say_of_itself_is_left_out(tmp_path: Path) -> None:
    said = [{"host": "b", "torch": ""}, {"processor": 7, "threads": None}, "x", {}, {"host": HOSTILE, "torch": [1]}]
    run = add_membership(make_run(tmp_path / "a"), change(20, 3, joined=1) | {"joined_with": said})
    assert change_rows(read_run(run))[1][0][6].startswith("b; 7; ")
    assert "<script>alert(1)" not in conditions_section([read_run(run)])


def test_without_changes_there_is_a_reason_and_no_table(tmp_path: Path) -> None:
    plain, other = make_run(tmp_path / "plain"), elastic_run(tmp_path / "elastic")
    found = membership([read_run(plain)])
    assert isinstance(found, Missing)
    assert "membership.jsonl" in found.why
    assert "Changes of the workers" not in conditions_section([read_run(plain)])
    assert isinstance(membership(read_runs([plain, other])), Missing)


def test_a_hostile_file_is_text_within_bounds(tmp_path: Path) -> None:
    folder = make_hostile_run(tmp_path / "a")
    found = changes(read_run(folder))
    assert [one.step for one in found] == [3, 4]
    assert found[1].time == ""
    write_report([folder], folder / "report.html")
    page = (folder / "report.html").read_text()
    assert "<img src=x" not in page
    many = make_run(tmp_path / "many")
    add_membership(many, *(change(step, 4, lost=100, joined=100) for step in range(2 * MAX_CHANGES)))
    rows = changes(read_run(many))
    assert len(rows) == MAX_CHANGES
    assert {len(one.lost) for one in rows} == {MAX_NAMES}
    assert "40 of 1,000" in conditions_section([read_run(many)])


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_file_is_named_and_does_not_block(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    os.mkfifo(folder / "membership.jsonl")
    run = read_run(folder)
    assert any("membership.jsonl" in problem for problem in run.problems)
    assert next(one for one in all_figures([run]) if isinstance(one, Missing)).key == "membership"
