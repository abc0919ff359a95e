"""Who takes part, in which order, who is ahead; and in what two workers differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megabatch.workers.roster import NEWCOMER, Roster, Seat, agreement_text, difference, part_of


def seat(name: str, *, since: int = 0, progress: int = NEWCOMER, **more: Any) -> Seat:
    here = {"host": "a", "store_host": "127.0.0.1", "store_port": 1, "waits_for": 1, "digest": "d", "agreement": "{}"}
    return Seat(name=name, since=since, progress=progress, **{**here, **more})


def test_all_agree_whether_enough_are_there_to_begin() -> None:
    """The roster alone says it, so that nobody goes ahead while others wait."""
    waiting = [replace(seat(name), waits_for=3) for name in "abc"]
    assert not Roster(1, (waiting[0], waiting[1])).is_complete
    assert Roster(1, (waiting[0], waiting[1], waiting[2])).is_complete
    assert Roster(1, (waiting[0], seat("b"))).is_complete  # one has waited long enough, or replaces a dead one
    assert Roster(1, (waiting[0], replace(waiting[1], since=5))).is_complete  # the run goes on already


def test_the_one_ahead_gives_its_state_to_those_behind() -> None:
    roster = Roster(
        1, (seat("a", since=1, progress=6), seat("b", since=1, progress=7), seat("c"), seat("d", progress=7))
    )
    assert roster.source == 1
    assert roster.behind() == [0, 2]
    assert not roster.is_beginning


def test_workers_are_told_in_what_they_differ() -> None:
    here = agreement_text({"threads": "1", "code": "ab", "comm.bucket_mb": "25.0"})
    there = agreement_text({"comm.bucket_mb": "1.0", "code": "ab", "threads": "1"})
    assert difference(here, there) == "comm.bucket_mb is '25.0' here and '1.0' there"
    assert difference(here, agreement_text({"code": "ab", "comm.bucket_mb": "25.0"})) == (
        "threads is '1' here and not told there"
    )
    far = agreement_text(dict.fromkeys(("threads", "code", "comm.bucket_mb", "more"), "9" * 5000))
    assert difference(here, far).endswith("there, and 1 more")
    assert len(difference(here, far)) < 400
    for damaged in ("", "[1]", "{", "1"):
        assert difference(here, damaged).startswith("code is 'ab' here and not told there")


def test_a_part_is_found_by_its_name() -> None:
    text = agreement_text({"torch": "2.12"})
    assert (part_of(text, "torch"), part_of(text, "numpy"), part_of("x", "torch")) == ("2.12", "", "")
