"""Who takes part: the same roster for all, signed entries only, workers of the same run only."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch.errors import LaunchError
from megabatch.workers.membership import Membership, TooFewWorkersError, start_lighthouse
from megabatch.workers.roster import NEWCOMER, Roster, agreement_text
from tests.ranks import run_ranks
from tests.workers.test_roster import seat

coordination = pytest.importorskip("torchft.coordination", reason="torchft is an extra: pip install megabatch[elastic]")

_numbers = itertools.count()
TOKEN = b"0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """A membership of local workers chooses it for its whole process, which is here that of other tests, too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")  # put back after the test


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = start_lighthouse("127.0.0.1:0")
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def member(lighthouse: str, agreement: str = "{}", token: bytes = TOKEN, **options: Any) -> Membership:
    name = f"worker-{next(_numbers)}"
    return Membership(name, lighthouse, token, agreement, **{"wait_seconds": 5.0, **options})


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
    own_names = {one.name for one in members}
    stranger = coordination.LighthouseClient(f"http://{lighthouse}", timedelta(seconds=5))

    def answer_with_all(pool: ThreadPoolExecutor, entry: dict[str, Any]) -> dict[str, Any]:
        """Entries of all three by name. On a busy machine one may be missing for a moment: then they ask again."""
        for _ in range(20):
            asked = pool.submit(stranger.quorum, "stranger", timedelta(seconds=20), data=entry)
            while not asked.done():
                for roster in ask_all(members, [NEWCOMER] * 2):
                    assert isinstance(roster, Roster)
                    assert set(roster.names) <= own_names
            found = {one.replica_id: one.data for one in asked.result().participants}
            if found.keys() == {*own_names, "stranger"}:
                return found
        raise AssertionError("the three never stood in one answer")

    with ThreadPoolExecutor(1) as pool:
        try:
            seen = answer_with_all(pool, {"signature": ""})  # first it only looks, then it sends what it has seen
            copied = seen[members[0].name]
            assert answer_with_all(pool, copied)["stranger"] == copied
        finally:
            for one in members:
                one.close()


def test_strangers_do_not_count_for_the_least_number_of_workers(lighthouse: str) -> None:
    alone = member(lighthouse, min_workers=2)
    with pytest.raises(TooFewWorkersError, match=r"fewer than 2 workers.* 5 s \(1 are there\)"):
        alone.ask(NEWCOMER)
    alone.close()


def test_a_worker_of_another_run_is_refused_and_told_in_what_it_differs(lighthouse: str) -> None:
    agreements = [agreement_text({"threads": threads, "code": "a1"}) for threads in ("1", "2")]
    members = [member(lighthouse, agreement, founders=2) for agreement in agreements]
    try:
        leads, refused = ask_all(members, [NEWCOMER] * 2)
        assert str(refused) == (
            f"this worker differs from the run that worker {members[0].name} leads: "
            "threads is '2' here and '1' there; start it with the same"
        )
        assert isinstance(refused, LaunchError)
        assert isinstance(leads, Roster)  # once it has waited long enough for another founder
        assert leads.names == (members[0].name,)
    finally:
        members[0].close()


def test_one_more_than_the_places_waits_for_a_free_one(lighthouse: str) -> None:
    """It is not refused, and those who take part do not wait for it."""
    inside, outside = (member(lighthouse, max_workers=1, wait_seconds=60.0) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        try:
            assert inside.ask(NEWCOMER).names == (inside.name,)
            inside.connect(inside.ask(NEWCOMER))
            waiting = pool.submit(outside.ask, NEWCOMER)
            for _ in range(5):  # each answer is given to both
                assert inside.ask(0).names == (inside.name,)
            assert not waiting.done()
            inside.close()
            assert waiting.result(timeout=50).names == (outside.name,)
        finally:
            inside.close()
            outside.close()


def test_nobody_answers() -> None:
    with pytest.raises(LaunchError, match=r"no lighthouse answers at 127\.0\.0\.1:9"):
        Membership("w", "127.0.0.1:9", TOKEN, "{}")
    with pytest.raises(LaunchError, match="the lighthouse address 'nowhere' is not usable"):
        Membership("w", "nowhere", TOKEN, "{}")


def test_a_worker_that_stands_still_is_left_behind_although_its_heart_beats(lighthouse: str) -> None:
    """As one whose disk hangs: its process lives, and only Python can tell that nothing goes on in it."""
    goes_on, members, found = threading.Event(), [], []

    def stand_still() -> None:
        members.append(member(lighthouse, founders=2, hang_seconds=0.5))
        found.append(members[-1].ask(NEWCOMER))
        goes_on.wait(20)
        found.append(members[-1].ask(NEWCOMER))

    still = threading.Thread(target=stand_still)
    still.start()
    moving = member(lighthouse, founders=2, hang_seconds=0.5)
    try:
        assert len(moving.ask(NEWCOMER).names) == 2
        assert moving.ask(NEWCOMER).names == (moving.name,)
        goes_on.set()
        while len((last := moving.ask(NEWCOMER)).names) == 1:
            assert still.is_alive()
        still.join(20)
        assert found[1] == last  # it is let in again
    finally:
        goes_on.set()
        still.join(20)
        for one in (moving, *members):
            one.close()


@pytest.mark.parametrize(("since", "tells"), [(2, True), (3, False)])
def test_the_two_who_are_members_for_longest_tell_newcomers_what_they_have(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch, since: int, tells: bool
) -> None:
    """Ranks are ordered host by host, so these two need not be the first two ranks."""
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    one = member(lighthouse)
    try:
        there: dict[str, Any] = {"store_host": one._store_host, "store_port": one._store_port, "digest": one._digest}
        own = seat(one.name, since=since, host="b" if tells else "a", **there)
        other = seat("other", since=5 - since, host="a" if tells else "b", **there)
        roster = Roster(9, one._ordered([seat("first", since=1, **there), own, other, seat("newcomer", **there)]))
        assert roster.world_of(one.name).rank == (3 if tells else 1)
        one.connect(roster)
        assert one._tells_agreement == tells
    finally:
        one.close()


def meet_after_a_failure(rank: int, address: str) -> int:
    """On rank 0 a try to meet somebody who is not there has failed before."""
    dist.barrier()  # who left at once would cut off one that still connects
    dist.destroy_process_group()
    one = Membership(f"w{rank}", address, TOKEN, "{}", founders=2, wait_seconds=60.0, hang_seconds=1.0)
    if rank == 0:
        own = seat(one.name, store_host=one._store_host, store_port=one._store_port)
        with pytest.raises(RuntimeError):
            one.connect(Roster(1, (own, seat("nobody"))))
        one.disconnect()
    one.hang_seconds = 20.0
    roster = one.ask(NEWCOMER)
    one.connect(roster)
    total = torch.ones(1)
    dist.all_reduce(total)
    one.disconnect()
    return int(total)


def test_a_worker_that_failed_to_meet_others_meets_them_the_next_time(lighthouse: str) -> None:
    """torch names the default group after the number of groups that it has begun to make, and failures count."""
    assert run_ranks(2, meet_after_a_failure, lighthouse) == [2, 2]
