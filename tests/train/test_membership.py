"""Who takes part: the same roster for all, signed entries only, workers of the same run only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from megabatch.errors import LaunchError
from megabatch.train.membership import NEWCOMER, Membership, Roster, Seat, TooFewWorkersError, start_lighthouse

coordination = pytest.importorskip("torchft.coordination", reason="torchft is an extra: pip install megabatch[elastic]")

_numbers = itertools.count()
TOKEN = b"0123456789abcdef" * 2


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = start_lighthouse("127.0.0.1:0")
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def member(lighthouse: str, digest: str = "d", token: bytes = TOKEN, **options: Any) -> Membership:
    name = f"worker-{next(_numbers)}"
    return Membership(name, lighthouse, token, digest, wait_seconds=5.0, **options)


def ask_all(members: list[Membership], progress: list[int]) -> list[Roster | Exception]:
    """All ask at the same time."""

    def ask(one: Membership, own: int) -> Roster | Exception:
        try:
            return one.ask(own)
        except LaunchError as error:
            one.close()  # as its process would
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(ask, members, progress))


def seat(name: str, host: str = "a", since: int = 0, progress: int = NEWCOMER) -> Seat:
    return Seat(name, host, "127.0.0.1", 1, since, progress, 1, "d")


def test_all_agree_whether_enough_are_there_to_begin() -> None:
    """The roster alone says it, so that nobody goes ahead while others wait."""
    waiting = [replace(seat(name), waits_for=3) for name in "abc"]
    assert not Roster(1, (waiting[0], waiting[1])).is_complete
    assert Roster(1, (waiting[0], waiting[1], waiting[2])).is_complete
    assert Roster(1, (waiting[0], seat("b"))).is_complete  # one has waited long enough, or replaces a dead one
    assert Roster(1, (waiting[0], replace(waiting[1], since=5))).is_complete  # the run goes on already


def test_all_get_the_same_roster(lighthouse: str) -> None:
    members = [member(lighthouse, founders=3) for _ in range(3)]
    try:
        rosters = ask_all(members, [NEWCOMER] * 3)
        assert rosters[0] == rosters[1] == rosters[2]
        assert isinstance(rosters[0], Roster)
        assert sorted(rosters[0].names) == sorted(one.name for one in members)
        assert rosters[0].is_beginning
        worlds = [rosters[0].world_of(one.name) for one in members]
        assert sorted(world.rank for world in worlds) == [0, 1, 2]
        assert {world.local_size for world in worlds} == {3}
    finally:
        for one in members:
            one.close()


def test_who_has_no_token_is_passed_over(lighthouse: str) -> None:
    members = [member(lighthouse, founders=2), member(lighthouse, founders=2)]
    stranger = coordination.LighthouseClient(f"http://{lighthouse}", timedelta(seconds=5))
    forged = {**seat("stranger").__dict__, "signature": "0" * 64}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stranger.quorum, "stranger", timedelta(seconds=20), data=forged)
        try:
            for _ in range(100):  # until the stranger has asked in time to be in an answer
                rosters = ask_all(members, [NEWCOMER] * 2)
                assert all(isinstance(one, Roster) and len(one.seats) == 2 for one in rosters)
                if asked.done():
                    break
            answer = asked.result(timeout=20)  # the lighthouse itself takes anybody
            assert "stranger" in [one.replica_id for one in answer.participants]
        finally:
            for one in members:
                one.close()
            asked.cancel()


def test_a_signed_entry_under_another_name_is_passed_over(lighthouse: str) -> None:
    """Whoever asks the lighthouse sees the entries of all, and may send one of them again."""
    members = [member(lighthouse, founders=2), member(lighthouse, founders=2)]
    stranger = coordination.LighthouseClient(f"http://{lighthouse}", timedelta(seconds=5))
    copied: dict[str, Any] = {"signature": ""}
    with ThreadPoolExecutor(1) as pool:
        try:
            for _ in range(2):  # first it only looks, then it sends what it has seen
                asked = pool.submit(stranger.quorum, "stranger", timedelta(seconds=20), data=copied)
                for _ in range(100):
                    rosters = ask_all(members, [NEWCOMER] * 2)
                    assert all(isinstance(one, Roster) and len(one.seats) == 2 for one in rosters)
                    if asked.done():
                        break
                answer = asked.result(timeout=20)
                copied = next(one.data for one in answer.participants if one.replica_id == members[0].name)
            assert len(answer.participants) == 3
        finally:
            for one in members:
                one.close()


def test_strangers_do_not_count_for_the_least_number_of_workers(lighthouse: str) -> None:
    alone = member(lighthouse, min_workers=2)
    with pytest.raises(TooFewWorkersError, match=r"fewer than 2 workers.* 5 s \(1 are there\)"):
        alone.ask(NEWCOMER)
    alone.close()


def test_a_worker_of_another_run_is_refused_by_name(lighthouse: str) -> None:
    members = [member(lighthouse, "one", founders=2), member(lighthouse, "other", founders=2)]
    try:
        leads, refused = ask_all(members, [NEWCOMER] * 2)
        assert f"are not those of the run that worker {members[0].name} leads" in str(refused)
        assert isinstance(refused, LaunchError)
        assert isinstance(leads, Roster)  # once it has waited long enough for another founder
        assert leads.names == (members[0].name,)
    finally:
        members[0].close()


def test_nobody_answers() -> None:
    with pytest.raises(LaunchError, match=r"no lighthouse answers at 127\.0\.0\.1:9"):
        Membership("w", "127.0.0.1:9", TOKEN, "d")
    with pytest.raises(LaunchError, match="the lighthouse address 'nowhere' is not usable"):
        Membership("w", "nowhere", TOKEN, "d")


def test_the_one_ahead_gives_its_state_to_those_behind() -> None:
    roster = Roster(
        1, (seat("a", since=1, progress=6), seat("b", since=1, progress=7), seat("c"), seat("d", progress=7))
    )
    assert roster.source == 1
    assert roster.behind() == [0, 2]
    assert not roster.is_beginning
