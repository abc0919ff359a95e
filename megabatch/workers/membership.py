"""Elastic membership: workers come and go while a run goes on.

A lighthouse (torchft) knows who is alive: every worker sends heartbeats to it, and asks it now and then who takes part.
It answers all who ask with the same list. From this roster every worker works out the same order of ranks; they meet in
a store that the first of them serves, make a process group, and go on with the step that was not finished. Ghost
batches are sharded anew over those who are there, and sums are exact, so nobody can tell from the weights who computed.

torchft's own manager would divide by whoever took part and send state by pickle; of torchft only the lighthouse, its
client and the heartbeats of its manager server are used here.

Who may take part: a worker signs its entry with the run's token, and its agreement (settings, code, data, versions,
processor, threads) must be that of the others. Entries without a signature are passed over; a worker with another
agreement is refused, and told in what it differs.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megabatch.comm.p2p import group_named, hang_up, uses_gloo
from megabatch.errors import LaunchError, first_line
from megabatch.machine import host_name
from megabatch.workers.roster import Roster, Seat, by_seniority, difference, digest_of
from megabatch.workers.token import is_signed, sign

HEARTBEAT_SECONDS = 0.1
HEARTBEAT_TIMEOUT_SECONDS = 0.7
_LIGHTHOUSE_TICK_SECONDS = 0.02
_LATE_SECONDS = 60.0  # how long the lighthouse waits for a worker that lives but does not ask
_CONNECT_SECONDS = 10.0


class OtherRunError(LaunchError):
    """This worker differs from those who lead the run."""


class TooFewWorkersError(LaunchError):
    """The run cannot go on with those who are there."""


class Membership:
    """This worker's part in an elastic run.

    lighthouse: its address, HOST:PORT. agreement: what all must have in common, see
    `agreement_text`. way: where this host finds the lighthouse, see `door`. founders: how many workers begin the
    run together, if they come within `wait_seconds`. min_workers: with fewer the run waits, at most `wait_seconds`.
    max_workers: further ones wait for a free place. hang_seconds: how long a worker waits for a message of another.
    """

    def __init__(
        self,
        name: str,
        lighthouse: str,
        token: bytes,
        agreement: str,
        *,
        founders: int = 1,
        min_workers: int = 1,
        max_workers: int = 0,
        wait_seconds: float = 60.0,
        hang_seconds: float = 15.0,
        way: str = "",
    ) -> None:
        client = _torchft("LighthouseClient")
        self.name = name
        self.hang_seconds = hang_seconds
        self._token, self._agreement = token, agreement
        self._digest, self._tells_agreement = digest_of(agreement), True
        self._founders, self._min_workers, self._max_workers = founders, min_workers, max_workers
        self._wait_seconds = wait_seconds
        self._since = 0
        address = _own_address(lighthouse)
        if address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all workers are local: Gloo listens for them alone
        # A store server for the case that this worker becomes the first; it listens where the others can reach it.
        listener = socket.create_server((address, 0))
        self._store_host, self._store_port = address, int(listener.getsockname()[1])
        self._store = TCPStore(
            address,
            self._store_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=_CONNECT_SECONDS),
        )
        self._url = f"http://{way or lighthouse}"
        self._heart: Any = None
        self._asks, self._closed, self._beating = False, threading.Event(), threading.Lock()
        try:
            self._client = client(self._url, timedelta(seconds=_CONNECT_SECONDS))
            self._beat()
        except Exception as error:
            raise no_answer(lighthouse, error) from None
        threading.Thread(target=self._watch, args=[threading.get_ident()], daemon=True).start()

    def ask(self, progress: int) -> Roster:
        """Ask the lighthouse who takes part; every member must ask, and all get the same answer.

        progress: how far this worker's state is; the one that is furthest ahead shares its state. `NEWCOMER`: none.
        """
        with self._beating:
            self._asks = True
            self._beat()
        try:
            return self._ask(progress)
        finally:
            self._asks = False

    def _ask(self, progress: int) -> Roster:
        began = time.monotonic()
        while True:
            is_late = time.monotonic() - began >= self._wait_seconds
            roster = self._ask_once(progress, 1 if is_late else self._founders)
            is_enough = len(roster.seats) >= self._min_workers  # the lighthouse counts strangers too
            if is_late and not is_enough:
                raise self._too_few(f"{len(roster.seats)} are there")
            if self.name not in roster.names:  # all places are taken: wait for one to become free
                continue
            if roster.is_complete and is_enough:
                return roster
            time.sleep(HEARTBEAT_SECONDS)

    def connect(self, roster: Roster) -> None:
        """Make the default process group of a roster's workers."""
        world = roster.world_of(self.name)
        store = self._store
        if world.rank != 0:
            timeout = timedelta(seconds=_CONNECT_SECONDS)
            store = TCPStore(world.meeting_host, world.meeting_port, is_master=False, timeout=timeout)
        meeting = PrefixStore(sign(self._token, f"roster {roster.key}"), store)
        timeout = timedelta(seconds=self.hang_seconds)
        # torch would count tries that failed, too: one who failed more often than others would wait elsewhere.
        with group_named("elastic"):
            dist.init_process_group("gloo", store=meeting, rank=world.rank, world_size=world.size, timeout=timeout)
        dist.barrier()  # so that whoever is gone is noticed here
        self._since = self._since or roster.key
        # Newcomers compare themselves with the first, or with who takes its place. Others save the lighthouse the text.
        self._tells_agreement = self.name in [seat.name for seat in by_seniority(roster.seats)[:2]]

    def disconnect(self) -> None:
        """Leave the process group at once; workers that wait for this one notice."""
        if dist.is_initialized():
            group = dist.group.WORLD
            if group is not None and group.size() > 1 and uses_gloo(group):
                hang_up(group)
            dist.destroy_process_group()

    def share(self, roster: Roster, give: Callable[[], bytes], take: Callable[[bytes], None]) -> None:
        """Bring workers that are behind to the state of the one that is ahead; every member must call it."""
        rank, source, behind = dist.get_rank(), roster.source, roster.behind()
        if rank == source and behind:
            content = torch.frombuffer(bytearray(give()), dtype=torch.uint8)
            for receiver in behind:
                dist.send(torch.tensor([content.numel()]), receiver)
                dist.send(content, receiver)
        elif rank in behind:
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, source)
            received = torch.empty(int(length.item()), dtype=torch.uint8)
            dist.recv(received, source)
            take(received.numpy().tobytes())

    def close(self) -> None:
        """Take part no longer."""
        self._closed.set()
        with self._beating:
            self._rest()
        self.disconnect()

    def _beat(self) -> None:
        """Let the lighthouse know that this worker lives, by threads that need no interpreter lock."""
        if self._heart is None:
            self._heart = _torchft("ManagerServer")(  # nobody calls it as a server
                replica_id=self.name,
                lighthouse_addr=self._url,
                hostname="127.0.0.1",
                bind="127.0.0.1:0",
                store_addr="",
                world_size=1,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_SECONDS),
                connect_timeout=timedelta(seconds=_CONNECT_SECONDS),
                quorum_retries=0,
            )

    def _rest(self) -> None:
        if self._heart is not None:
            self._heart.shutdown()
            self._heart = None

    def _watch(self, thread: int) -> None:
        """Stop the heartbeats when the thread that trains stands at one place for too long, until it asks again.

        Its disk may hang. The others wait for it `hang_seconds` at most, but the lighthouse would as long as it beats.
        """
        place, since = None, time.monotonic()
        while not self._closed.wait(self.hang_seconds / 8):
            frame = sys._current_frames().get(thread)
            now = frame and (id(frame), frame.f_lasti)
            if now != place or self._asks:
                place, since = now, time.monotonic()
            elif time.monotonic() - since > 2 * self.hang_seconds:
                with self._beating:
                    if not self._asks:
                        self._rest()

    def _ask_once(self, progress: int, waits_for: int) -> Roster:
        began, address = time.monotonic(), (self._store_host, self._store_port)
        told = self._agreement if self._tells_agreement else ""
        own = Seat(self.name, host_name(), *address, self._since, progress, waits_for, self._digest, told)
        data = {**asdict(own), "signature": sign(self._token, _signed_text(own))}
        while True:
            left = self._wait_seconds - (time.monotonic() - began)
            try:
                answer = self._client.quorum(self.name, timedelta(seconds=max(1.0, left)), data=data)
                break
            except Exception as error:
                if time.monotonic() - began < self._wait_seconds:  # it may be starting again
                    time.sleep(HEARTBEAT_SECONDS)
                    continue
                raise self._too_few(first_line(error)) from None
        key = answer.created.seconds * 10**9 + answer.created.nanos
        said = [(one.replica_id, self._seat(one.data)) for one in answer.participants]
        # Whoever asks sees the signed entries of the others: under another name than its own an entry is a copy.
        return Roster(key, self._ordered([seat for name, seat in said if seat is not None and seat.name == name]))

    def _too_few(self, what: str) -> TooFewWorkersError:
        return TooFewWorkersError(
            f"fewer than {self._min_workers} workers, or no lighthouse, for {self._wait_seconds:g} s "
            f"({what}); start more workers, then go on with --resume"
        )

    def _seat(self, data: Any) -> Seat | None:
        """What a participant said of itself; None unless it is whole and signed."""
        if not isinstance(data, dict):
            return None
        texts, numbers = (
            ("name", "host", "store_host", "digest", "agreement"),
            ("store_port", "since", "progress", "waits_for"),
        )
        kinds = dict.fromkeys(texts, str) | dict.fromkeys(numbers, int)
        if any(type(data.get(field)) is not kind for field, kind in kinds.items()):
            return None
        seat = Seat(**{field: data[field] for field in kinds})
        return seat if is_signed(self._token, _signed_text(seat), str(data.get("signature", ""))) else None

    def _ordered(self, seats: list[Seat]) -> tuple[Seat, ...]:
        """The order of ranks: by seniority, host by host, so that rows of the grid are hosts."""
        seniority = by_seniority(seats)
        leading = seniority[0].digest if seniority else ""
        if self._digest != leading and any(seat.name == self.name for seat in seniority):
            raise OtherRunError(
                f"this worker differs from the run that worker {seniority[0].name} leads: "
                f"{difference(self._agreement, seniority[0].agreement)}; start it with the same"
            )
        fitting = [seat for seat in seniority if seat.digest == leading]
        members = fitting[: self._max_workers or None]
        hosts = list(dict.fromkeys(seat.host for seat in members))
        return tuple(sorted(members, key=lambda seat: hosts.index(seat.host)))


def start_lighthouse(bind: str, min_workers: int = 1) -> Any:
    """Serve a lighthouse at `bind` (HOST:PORT, port 0 for any); `address()` says where, `shutdown()` ends it."""
    server = _torchft("LighthouseServer")
    try:
        return server(
            bind=bind,
            min_replicas=min_workers,
            join_timeout_ms=int(_LATE_SECONDS * 1000),
            quorum_tick_ms=int(_LIGHTHOUSE_TICK_SECONDS * 1000),
            heartbeat_timeout_ms=int(HEARTBEAT_TIMEOUT_SECONDS * 1000),
        )
    except Exception as error:
        raise LaunchError(f"no lighthouse can listen at '{bind}' ({first_line(error)}); give HOST:PORT") from None


def check_address(lighthouse: str) -> None:
    """Raise LaunchError unless torchft is installed and this is an address to which this host knows a way."""
    _torchft("LighthouseClient")
    _own_address(lighthouse)


def _torchft(name: str) -> Any:
    os.environ.setdefault("RUST_LOG", "error")  # before its library is loaded
    try:
        coordination = importlib.import_module("torchft.coordination")  # it has no types
    except ImportError:
        raise LaunchError("elastic runs need torchft; pip install 'megabatch[elastic]'") from None
    return getattr(coordination, name)


def _signed_text(seat: Seat) -> str:
    return json.dumps(asdict(seat))


def _own_address(lighthouse: str) -> str:
    """The address of this host on the way to the lighthouse."""
    host, _, port = lighthouse.rpartition(":")
    try:
        if not (port.isascii() and port.isdigit() and 0 < len(port) < 6 and 0 < int(port) < 2**16):
            raise ValueError("a port is 1 to 65535")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"the lighthouse address '{lighthouse[:100]}' is not usable ({error}); give HOST:PORT, the host by its "
            "name or its IPv4 address"
        ) from None


def no_answer(lighthouse: str, error: Exception) -> LaunchError:
    """The error when nobody answers there."""
    return LaunchError(
        f"no lighthouse answers at {lighthouse} ({first_line(error)}); "
        "start one with `megabatch lighthouse`, and check address and network"
    )
