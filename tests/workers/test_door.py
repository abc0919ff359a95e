"""Only who has the token gets through to the lighthouse; cut connections are made again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from megabatch.errors import LaunchError
from megabatch.workers import door
from megabatch.workers.membership import Membership, TooFewWorkersError, start_lighthouse
from megabatch.workers.roster import NEWCOMER
from megabatch.workers.token import sign

coordination = pytest.importorskip("torchft.coordination", reason="torchft is an extra: pip install megabatch[elastic]")

TOKEN, OTHER = b"0123456789abcdef" * 2, b"fedcba9876543210" * 2


@pytest.fixture(autouse=True)
def own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """A membership of local workers chooses it for its whole process, which is here that of other tests, too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")  # put back after the test


@pytest.fixture
def lighthouse() -> Iterator[door.GuardedLighthouse]:
    server = door.GuardedLighthouse("127.0.0.1:0", TOKEN)
    yield server
    server.close()


@pytest.fixture
def way(lighthouse: door.GuardedLighthouse) -> Iterator[str]:
    opened = door.Way(lighthouse.address, TOKEN)
    yield opened.address
    opened.close()


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_workers_of_two_hosts_meet_behind_the_door(lighthouse: door.GuardedLighthouse, way: str) -> None:
    second = door.Way(lighthouse.address, TOKEN)
    members = [
        Membership(f"w{number}", lighthouse.address, TOKEN, "{}", founders=2, wait_seconds=10.0, way=one)
        for number, one in enumerate((way, second.address))
    ]
    found: list[object] = []
    threads = [threading.Thread(target=lambda one=one: found.append(one.ask(NEWCOMER))) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for one in members:
        one.close()
    second.close()
    assert len(found) == 2
    assert found[0] == found[1]


def test_heartbeats_of_strangers_do_not_reach_the_lighthouse(lighthouse: door.GuardedLighthouse, way: str) -> None:
    """Straight to a lighthouse without a door, they hold up whoever asks: the control shows it."""
    open_server = start_lighthouse("127.0.0.1:0")
    open_address = f"127.0.0.1:{open_server.address().rpartition(':')[2]}"
    over, stop = [], threading.Event()

    def beat(address: str, name: str) -> None:
        while not stop.wait(0.1):
            try:
                client = coordination.LighthouseClient(f"http://{address}", timedelta(seconds=1))
                while not stop.wait(0.1):
                    client.heartbeat(name, timedelta(seconds=1))
            except Exception as error:
                over.append((address, str(error)))

    strangers = [threading.Thread(target=beat, args=(address, "s")) for address in (lighthouse.address, open_address)]
    for stranger in strangers:
        stranger.start()
    stop.wait(1.0)
    try:
        guarded = Membership("w", lighthouse.address, TOKEN, "{}", wait_seconds=4.0, way=way)
        assert guarded.ask(NEWCOMER).names == ("w",)
        guarded.close()
        held_up = Membership("w", open_address, TOKEN, "{}", wait_seconds=4.0)
        with pytest.raises(TooFewWorkersError):
            held_up.ask(NEWCOMER)
        held_up.close()
    finally:
        stop.set()
        for stranger in strangers:
            stranger.join(20)
        open_server.shutdown()
    assert {address for address, _ in over} == {lighthouse.address}


def test_another_token_is_refused_in_one_line(lighthouse: door.GuardedLighthouse) -> None:
    with pytest.raises(LaunchError, match=r"the lighthouse at 127\.0\.0\.1:\d+ has another token; give") as caught:
        door.Way(lighthouse.address, OTHER)
    assert "\n" not in str(caught.value)


def test_what_is_no_lighthouse_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as client:
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\n")
                client.recv(1000)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(LaunchError, match=r"is no megabatch lighthouse"):
            door.Way(f"127.0.0.1:{server.getsockname()[1]}", TOKEN)
        answering.join(10)


@pytest.mark.parametrize(
    "said", [b"", b"\n", b"x" * 5000, b"\xff\xfe\n", b"a b\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
def test_the_door_closes_on_nonsense_and_lives(lighthouse: door.GuardedLighthouse, said: bytes) -> None:
    with connect(lighthouse.address) as stranger:
        assert stranger.recv(1000).startswith(b"megabatch lighthouse ")
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    door.Way(lighthouse.address, TOKEN).close()


def test_an_answer_that_was_heard_before_opens_nothing(lighthouse: door.GuardedLighthouse) -> None:
    """A number is drawn for each connection, so what one way has said fits no other greeting."""

    async def greet() -> tuple[bytes, bytes]:
        reader, writer = await door._connect(lighthouse.address)
        theirs = (await reader.readline()).decode().split()[-1]
        said = f"abc {sign(TOKEN, f'way {theirs} abc')}\n".encode()
        writer.write(said)
        answer = await reader.readline()
        writer.close()
        return said, answer

    said, answer = asyncio.run(greet())
    assert len(answer) == 65  # let through
    with connect(lighthouse.address) as stranger:
        stranger.recv(1000)
        stranger.sendall(said)
        assert stranger.recv(1000) == b""


def test_a_lighthouse_that_was_started_again_is_found_again() -> None:
    first = door.GuardedLighthouse("127.0.0.1:0", TOKEN)
    opened = door.Way(first.address, TOKEN)
    member = Membership("w", first.address, TOKEN, "{}", wait_seconds=20.0, way=opened.address)
    try:
        before = member.ask(NEWCOMER)
        first.close()
        second = door.GuardedLighthouse(first.address, TOKEN)
        after = member.ask(NEWCOMER)
        assert after.names == before.names
        assert after.key > before.key
        second.close()
    finally:
        member.close()
        opened.close()


def test_an_address_that_is_taken_or_is_none_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        for bind in (where, "nonsense", "127.0.0.1:", "127.0.0.1:99999", ":0"):
            with pytest.raises(LaunchError, match=f"no lighthouse can listen at '{bind}' .*give HOST:PORT") as caught:
                door.GuardedLighthouse(bind, TOKEN)
            assert "\n" not in str(caught.value)
