"""Loads the laboratory's links with plain TCP streams and echo requests, from one process and without any tool.

A socket belongs to the namespace in which it was opened, so one process can hold the two ends of every stream.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

from megabatch.errors import CommunicationError

from .laboratory import Laboratory
from .namespaces import inside

__all__ = ["round_trip_seconds", "stream_rates"]

_CHUNK_BYTES = 1 << 18
_CONNECT_SECONDS = 10.0
_PORT = 9000
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h


def _checksum(data: bytes) -> int:
    """The internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return 0xFFFF - total


def round_trip_seconds(
    lab: Laboratory, source: int, destination: int, count: int, timeout_seconds: float = 5.0
) -> list[float]:
    """Round-trip times of `count` ICMP echo requests between two stations; the kernel of the far one answers."""
    with inside(lab.namespaces[source]):
        prober = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    address = lab.network.stations[destination].address
    identifier = os.getpid() & 0xFFFF
    with prober:
        prober.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        prober.settimeout(timeout_seconds)
        times = []
        for sequence in range(count):
            body = struct.pack("!BBHHH", 8, 0, 0, identifier, sequence) + b"megabatch netlab"
            request = body[:2] + struct.pack("!H", _checksum(body)) + body[4:]
            sent_ns = time.time_ns()
            prober.sendto(request, (address, 0))
            times.append((_echo_arrival_ns(prober, identifier, sequence, address) - sent_ns) / 1e9)
            time.sleep(0.01)
    return times


def _echo_arrival_ns(prober: socket.socket, identifier: int, sequence: int, address: str) -> int:
    """When the kernel received the reply; our own wait for a turn on the CPU is not the network's."""
    while True:
        try:
            reply, notes, _, _ = prober.recvmsg(2048, 256)
        except TimeoutError:
            raise CommunicationError(
                f"{address} did not answer an echo request in time; the link is cut or the emulator stalled"
            ) from None
        if struct.unpack_from("!BxxxHH", reply, 20) == (0, identifier, sequence):
            seconds, nanoseconds = struct.unpack("@qq", notes[0][2])
            return int(seconds * 1_000_000_000 + nanoseconds)


def stream_rates(
    lab: Laboratory, pairs: Sequence[tuple[int, int]], seconds: float, warm_up_seconds: float = 0.5
) -> list[float]:
    """Bytes per second that arrive on one TCP stream per (source, destination) station pair, all at once."""
    with ExitStack() as stack:
        senders, receivers = [], []
        for number, (source, destination) in enumerate(pairs):
            sender, receiver = _connect(lab, source, destination, _PORT + number)
            senders.append(stack.enter_context(sender))
            receivers.append(stack.enter_context(receiver))
        stop = threading.Event()
        pump = threading.Thread(target=_send_until, args=(senders, stop), daemon=True)
        pump.start()
        try:
            return _received_rates(receivers, warm_up_seconds, seconds)
        finally:
            stop.set()
            pump.join(timeout=10)


def _connect(lab: Laboratory, source: int, destination: int, port: int) -> tuple[socket.socket, socket.socket]:
    address = lab.network.stations[destination].address
    with inside(lab.namespaces[destination]):
        listener = socket.socket()
    with inside(lab.namespaces[source]):
        sender = socket.socket()
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1)
        sender.settimeout(_CONNECT_SECONDS)
        sender.connect((address, port))
        listener.settimeout(_CONNECT_SECONDS)
        receiver, _ = listener.accept()
    for end in (sender, receiver):
        end.setblocking(False)
    # Closing drops what is still queued, so that one measurement does not run into the next.
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # Wake the reader for a few packets at a time: it shares the CPU with what it measures.
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 32768)
    return sender, receiver


def _send_until(senders: Sequence[socket.socket], stop: threading.Event) -> None:
    chunk = bytes(_CHUNK_BYTES)
    with selectors.DefaultSelector() as ready:
        for sender in senders:
            ready.register(sender, selectors.EVENT_WRITE, sender)
        while not stop.is_set():
            for key, _ in ready.select(timeout=0.1):
                try:
                    key.data.send(chunk)
                except (BlockingIOError, ConnectionError):
                    continue


def _received_rates(receivers: Sequence[socket.socket], warm_up_seconds: float, seconds: float) -> list[float]:
    counts = [0] * len(receivers)
    buffer = bytearray(_CHUNK_BYTES)
    with selectors.DefaultSelector() as ready:
        for index, receiver in enumerate(receivers):
            ready.register(receiver, selectors.EVENT_READ, (index, receiver))
        begin = _count_until(ready, counts, buffer, time.perf_counter() + warm_up_seconds)
        before = list(counts)
        end = _count_until(ready, counts, buffer, begin + seconds)
    return [(after - first) / (end - begin) for after, first in zip(counts, before, strict=True)]


def _count_until(ready: selectors.BaseSelector, counts: list[int], buffer: bytearray, deadline: float) -> float:
    while (now := time.perf_counter()) < deadline:
        for key, _ in ready.select(timeout=deadline - now):
            index, receiver = key.data
            try:
                counts[index] += receiver.recv_into(buffer)
            except BlockingIOError:
                continue
    return now
