"""`laboratory(network)`: builds the network, runs ranks in it, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megabatch.errors import LaunchError

from .forked import fork_ranks
from .links import LinkKind, Links, egress_shaper, join_stations
from .namespaces import Namespace, create_namespace, inside, processes_inside, run_batch
from .network import NIC_NAME, Network
from .ranks import CompletedRank, Job, end_orphans, port_of_run, rank_environment, run_jobs, torchrun_jobs

__all__ = ["Laboratory", "NicCounters", "laboratory", "unavailable_reason"]

T = TypeVar("T")


@dataclass(frozen=True)
class NicCounters:
    """What the kernel of a station counted at its NIC, in whole IP packets."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int
    dropped_packets: int

    def since(self, earlier: NicCounters) -> NicCounters:
        """The difference to an earlier reading."""
        return NicCounters(*(getattr(self, name) - getattr(earlier, name) for name in NicCounters.__dataclass_fields__))


class Laboratory:
    """A network that is up; made by `laboratory`."""

    def __init__(self, network: Network, namespaces: Sequence[Namespace], links: Links) -> None:
        """Take over a finished network."""
        self.network = network
        self.namespaces = tuple(namespaces)  # in the order of `network.stations`
        self.links = links
        self._runs = 0

    def run_ranks(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 300.0,
        *,
        live_rank: int | None = None,
        grace_seconds: float | None = None,
    ) -> list[CompletedRank]:
        """Run `argv` once per rank inside its host, with torchrun's variables set; one entry per rank."""
        port = self._next_port()
        jobs = [
            Job(
                rank=rank,
                station=self.network.station_of_rank(rank),
                argv=argv,
                environment={**rank_environment(self.network, rank, port), **(env or {})},
            )
            for rank in range(self.network.world_size)
        ]
        return self._run(jobs, timeout_seconds, live_rank, grace_seconds)

    def run_torchrun(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 300.0,
        *,
        live_rank: int | None = None,
        grace_seconds: float | None = None,
    ) -> list[CompletedRank]:
        """Run `argv` under a real torchrun per host, which find each other by c10d; one entry per host."""
        jobs = torchrun_jobs(self.network, self.namespaces, argv, env or {}, self._next_port())
        return self._run(jobs, timeout_seconds, live_rank, grace_seconds)

    def fork_ranks(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout_seconds: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Return `[fn(rank, *args) for every rank]`, forked from a server that has torch imported already.

        `fn` is a module-level function; it finds the same environment as under `run_ranks`, so that
        `init_process_group("gloo")` just works in it.
        """
        port = self._next_port()
        ranks = range(self.network.world_size)
        places = [self.namespaces[self.network.station_of_rank(rank).index].paths for rank in ranks]
        environments = [{**rank_environment(self.network, rank, port), **(env or {})} for rank in ranks]
        try:
            return fork_ranks(places, environments, fn, args, timeout_seconds)
        finally:
            self._end_strangers()

    def nic_counters(self) -> list[NicCounters]:
        """Counters of every NIC, in the order of `network.stations`."""
        return [_read_counters(namespace) for namespace in self.namespaces]

    def cut_host(self, host: int) -> None:
        """Unplug all NICs of `host`: packets vanish, nobody is told."""
        for station in self.network.stations:
            if station.host == host:
                self.links.cut(station.index)

    def join_host(self, host: int) -> None:
        """Plug the NICs of `host` in again."""
        for station in self.network.stations:
            if station.host == host:
                self.links.join(station.index)

    def limit_nic(self, index: int, rate_mbit_per_second: float) -> None:
        """Let one NIC send more slowly from now on: the sick cable a pre-flight check should find."""
        with inside(self.namespaces[index]):
            run_batch("tc", [f"qdisc replace {egress_shaper(self.network, rate_mbit_per_second)}"])

    def close(self) -> None:
        """End every process that is still inside, then take the links and the namespaces away."""
        with ExitStack() as stack:
            for namespace in self.namespaces:
                stack.callback(namespace.close)
            stack.callback(self.links.close)
            stack.callback(self._end_strangers)

    def _run(
        self,
        jobs: Sequence[Job],
        timeout_seconds: float,
        live_rank: int | None,
        grace_seconds: float | None,
    ) -> list[CompletedRank]:
        try:
            return run_jobs(jobs, self.namespaces, timeout_seconds, live_rank=live_rank, grace_seconds=grace_seconds)
        finally:
            self._end_strangers()

    def _end_strangers(self) -> None:
        """Kill whatever a rank left behind in the stations."""
        deadline = time.monotonic() + 5.0
        while left := [pid for pid in processes_inside(self.namespaces) if pid != os.getpid()]:
            if time.monotonic() > deadline:
                break
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)

    def _next_port(self) -> int:
        self._runs += 1
        return port_of_run(self._runs)


@contextmanager
def laboratory(network: Network, *, link: LinkKind = "auto") -> Iterator[Laboratory]:
    """Build `network` for the duration of the `with` block.

    Raises `LaunchError` where this machine cannot: not Linux, not root, no `ip`, or neither netem nor TUN and a
    C compiler.
    """
    reason = unavailable_reason()
    if reason:
        raise LaunchError(reason)
    end_orphans()
    with ExitStack() as undo:
        first_address: dict[int, str] = {}
        namespaces = []
        for station in network.stations:
            name = first_address.setdefault(station.host, station.address)
            namespaces.append(create_namespace(name))
            undo.callback(namespaces[-1].close)
        links = join_stations(network, namespaces, link)
        undo.pop_all()
    lab = Laboratory(network, namespaces, links)
    try:
        yield lab
    finally:
        lab.close()


def unavailable_reason() -> str | None:
    """One line why this machine can hold no laboratory, or None when it can."""
    if not sys.platform.startswith("linux"):
        return f"the network laboratory needs Linux namespaces; this is {sys.platform}; run it on a Linux machine"
    if os.geteuid() != 0:
        return "the network laboratory must be root to make network namespaces; run it with sudo"
    for tool in ("ip", "tc", "setpriv"):
        if not any((Path(folder) / tool).exists() for folder in os.get_exec_path()):
            package = "util-linux" if tool == "setpriv" else "iproute2"
            return f"the network laboratory needs the command '{tool}'; install {package}"
    return None


def _read_counters(namespace: Namespace) -> NicCounters:
    with inside(namespace):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{NIC_NAME}:"))
    numbers = [int(field) for field in fields]  # receive: bytes packets errs drop ...; transmit from column 8
    return NicCounters(
        sent_bytes=numbers[8],
        sent_packets=numbers[9],
        received_bytes=numbers[0],
        received_packets=numbers[1],
        dropped_packets=numbers[3] + numbers[11],
    )
