"""The forwarder, fed with hand-made packets over socket pairs in place of TUN devices: no root needed."""

from __future__ import annotations

import shutil
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.netlab.forwarder import Forwarder, compile_forwarder
from benchmarks.netlab.network import Network
from megabatch.errors import LaunchError

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler to build the forwarder with"
)


def packet(network: Network, destination: int, number: int, length: int = 100) -> bytes:
    """An IPv4 header, as far as the forwarder reads it, then the packet's number and padding."""
    address = socket.inet_aton(network.stations[destination].address)
    return (struct.pack("!BxxxxxxxxxxxxxxxB", 0x45, 0)[:16] + address + struct.pack("!I", number)).ljust(length, b".")


def number_of(data: bytes) -> int:
    return int(struct.unpack_from("!I", data, 20)[0])


@contextmanager
def cabled(network: Network) -> Iterator[tuple[Forwarder, list[socket.socket]]]:
    """A forwarder with one end of a datagram pair per station; ours are the other ends."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in network.stations]
    for ours, theirs in pairs:
        ours.settimeout(10)
        theirs.setblocking(False)
    forwarder = Forwarder(network, [theirs.fileno() for _, theirs in pairs])
    try:
        yield forwarder, [ours for ours, _ in pairs]
    finally:
        forwarder.close()
        for pair in pairs:
            for end in pair:
                end.close()


@needs_compiler
def test_packets_reach_the_owner_of_their_address_in_order_and_are_counted() -> None:
    network = Network(hosts=3, ranks_per_host=1, rate_mbit_per_second=0, latency_ms_one_way=1)
    with cabled(network) as (forwarder, nics):
        for number in range(5):
            nics[0].send(packet(network, 1, number, length=40 + 600 * number))
            nics[0].send(packet(network, 2, 100 + number))
        assert [number_of(nics[1].recv(9000)) for _ in range(5)] == [0, 1, 2, 3, 4]
        assert [number_of(nics[2].recv(9000)) for _ in range(5)] == [100, 101, 102, 103, 104]
        counters = forwarder.counters()
    first, second, third = counters["nics"]
    assert (first["sent_packets"], first["sent_bytes"]) == (10, 500 + sum(40 + 600 * n for n in range(5)))
    assert (second["received_packets"], second["received_bytes"]) == (5, sum(40 + 600 * n for n in range(5)))
    assert (third["received_packets"], third["received_bytes"]) == (5, 500)
    assert first["received_packets"] == second["sent_packets"] == 0
    assert sum(nic["dropped_packets"] for nic in counters["nics"]) == 0
    assert sum(counters["late_histogram"]) == 10


@needs_compiler
def test_a_packet_is_never_earlier_than_latency_and_its_own_length() -> None:
    network = Network(hosts=2, ranks_per_host=1, rate_mbit_per_second=8, latency_ms_one_way=30)
    with cabled(network) as (_, nics):
        start = time.monotonic()
        nics[0].send(packet(network, 1, 0, length=9000))  # 9 ms at one byte per microsecond
        nics[1].recv(9000)
        lone = time.monotonic() - start
        start = time.monotonic()
        for number in range(5):
            nics[0].send(packet(network, 1, number, length=9000))
        for _ in range(5):
            nics[1].recv(9000)
        five = time.monotonic() - start
    # The lower bounds are exact up to the 50 us a packet may be early; a busy machine can only be later.
    assert lone >= 0.0389
    assert five >= 0.0749


@needs_compiler
def test_two_senders_share_the_receivers_rate() -> None:
    network = Network(hosts=3, ranks_per_host=1, rate_mbit_per_second=8, latency_ms_one_way=0)
    with cabled(network) as (_, nics):
        start = time.monotonic()
        for number in range(4):
            nics[0].send(packet(network, 2, number, length=9000))
            nics[1].send(packet(network, 2, number, length=9000))
        for _ in range(8):
            nics[2].recv(9000)
        assert time.monotonic() - start >= 8 * 0.009 - 0.0001


@needs_compiler
def test_the_queue_of_one_sender_does_not_hold_up_another() -> None:
    network = Network(hosts=3, ranks_per_host=1, rate_mbit_per_second=4, latency_ms_one_way=1)
    with cabled(network) as (_, nics):
        for number in range(10):  # 18 ms each in the first sender's queue
            nics[0].send(packet(network, 2, number, length=9000))
        nics[1].send(packet(network, 2, 99))
        order = [number_of(nics[2].recv(9000)) for _ in range(11)]
    assert order.index(99) < 5
    assert [number for number in order if number != 99] == list(range(10))


@needs_compiler
def test_a_cut_nic_loses_both_directions_silently_until_it_is_joined() -> None:
    network = Network(hosts=2, ranks_per_host=1, rate_mbit_per_second=0, latency_ms_one_way=0)
    with cabled(network) as (forwarder, nics):
        forwarder.cut(1)
        nics[0].send(packet(network, 1, 1))
        nics[1].send(packet(network, 0, 2))
        nics[0].settimeout(0.2)
        with pytest.raises(TimeoutError):
            nics[0].recv(9000)
        dropped = [nic["dropped_packets"] for nic in forwarder.counters()["nics"]]
        forwarder.join(1)
        nics[0].settimeout(10)
        deadline = time.monotonic() + 10
        answered = False
        while not answered and time.monotonic() < deadline:  # the command and the packet take different ways
            nics[1].send(packet(network, 0, 3))
            nics[0].settimeout(0.2)
            try:
                answered = number_of(nics[0].recv(9000)) == 3
            except TimeoutError:
                continue
    assert dropped == [0, 2]
    assert answered


@needs_compiler
def test_what_is_not_ours_is_counted_and_forgotten() -> None:
    network = Network(hosts=2, ranks_per_host=1, rate_mbit_per_second=0, latency_ms_one_way=0)
    with cabled(network) as (forwarder, nics):
        nics[0].send(b"\x60" + bytes(60))  # IPv6
        nics[0].send(b"\x45")  # too short
        nics[0].send(packet(Network(hosts=9, ranks_per_host=1), 8, 0))  # nobody has this address
        nics[0].send(packet(network, 1, 7))
        assert number_of(nics[1].recv(9000)) == 7
        assert forwarder.counters()["foreign_packets"] == 3


@needs_compiler
def test_it_ends_when_the_laboratory_goes_away() -> None:
    network = Network(hosts=2, ranks_per_host=1)
    with cabled(network) as (forwarder, _):
        pid = forwarder.pid
    assert not Path(f"/proc/{pid}").exists()


@needs_compiler
def test_the_same_source_is_compiled_once(tmp_path: Path) -> None:
    program = compile_forwarder(tmp_path)
    made = program.stat().st_mtime_ns
    assert compile_forwarder(tmp_path) == program
    assert program.stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [program]


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LaunchError, match=r"no C compiler.*install gcc") as caught:
        compile_forwarder(tmp_path)
    assert "\n" not in str(caught.value)
