"""What a laboratory network looks like: hosts, NICs, addresses; plain data, no side effects.

A *station* is one network namespace with one NIC, called `nic0`, and one address. With `nic="host"` a station is a
whole host and its ranks reach each other over the loopback device. With `nic="rank"` every rank is a station of its
own, and the stations of one host are wired to each other directly, past the emulated network. One NIC per namespace,
rather than several in one, because Gloo binds the address it listens on but not the one it dials from: the kernel
would send every dialled connection through the first NIC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megabatch.errors import ConfigError, nearest

__all__ = ["ADDRESS_RANGE", "NETWORKS", "NIC_NAME", "Network", "Station", "named_network"]

ADDRESS_RANGE = "10.77.0.0/16"  # exists only inside the laboratory's own namespaces
NIC_NAME = "nic0"

MAX_HOSTS = 250
MAX_RANKS_PER_HOST = 64


@dataclass(frozen=True)
class Station:
    """One namespace: NIC number `index` of the network, on `host`, serving `ranks`."""

    index: int
    host: int
    address: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """Hosts of equal ranks, joined by one switch through NICs of equal rate and latency.

    `rate_mbit_per_second` holds for each NIC in each direction, counted on whole IP packets; 0 means unlimited.
    `latency_ms_one_way` is the time from NIC to NIC beside the time the packet's own length takes.
    """

    hosts: int
    ranks_per_host: int
    nic: Literal["host", "rank"] = "host"
    rate_mbit_per_second: float = 100.0
    latency_ms_one_way: float = 2.0
    mtu: int = 9000

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        for name, value, low, high in (
            ("hosts", self.hosts, 1, MAX_HOSTS),
            ("ranks_per_host", self.ranks_per_host, 1, MAX_RANKS_PER_HOST),
            ("rate_mbit_per_second", self.rate_mbit_per_second, 0, 100_000),
            ("latency_ms_one_way", self.latency_ms_one_way, 0, 10_000),
            ("mtu", self.mtu, 576, 65_535),
        ):
            if not low <= value <= high:
                raise ConfigError(f"network: {name} is {value:g}; it must lie between {low} and {high}; change it")
        if self.nic not in ("host", "rank"):
            raise ConfigError(f"network: nic is {self.nic!r}; choose 'host' (shared by its ranks) or 'rank'")

    @property
    def world_size(self) -> int:
        """Number of ranks in all hosts together."""
        return self.hosts * self.ranks_per_host

    @property
    def stations(self) -> tuple[Station, ...]:
        """Every NIC in order of the ranks it serves; NIC `k` of host `h` has the address 10.77.h.(k+1)."""
        nics_per_host = self.ranks_per_host if self.nic == "rank" else 1
        ranks_per_nic = self.ranks_per_host // nics_per_host
        return tuple(
            Station(
                index=index,
                host=index // nics_per_host,
                address=f"10.77.{index // nics_per_host}.{index % nics_per_host + 1}",
                ranks=tuple(range(index * ranks_per_nic, (index + 1) * ranks_per_nic)),
            )
            for index in range(self.hosts * nics_per_host)
        )

    def station_of_rank(self, rank: int) -> Station:
        """The station whose NIC carries what `rank` sends to other hosts."""
        ranks_per_nic = 1 if self.nic == "rank" else self.ranks_per_host
        return self.stations[rank // ranks_per_nic]

    def neighbours(self, station: Station) -> tuple[Station, ...]:
        """The other stations on the same host, which are reached without passing the NIC."""
        return tuple(s for s in self.stations if s.host == station.host and s != station)

    def describe(self) -> str:
        """One line for tables and logs."""
        rate = f"{self.rate_mbit_per_second:g} Mbit/s" if self.rate_mbit_per_second else "unlimited rate"
        return (
            f"{self.hosts} hosts x {self.ranks_per_host} ranks, a NIC per {self.nic}, {rate}, "
            f"{self.latency_ms_one_way:g} ms one way, MTU {self.mtu}"
        )


NETWORKS: dict[str, Network] = {
    "shared-nic": Network(4, 4, nic="host", rate_mbit_per_second=200, latency_ms_one_way=2),
    "nic-per-rank": Network(4, 4, nic="rank", rate_mbit_per_second=100, latency_ms_one_way=2),
    "equal-hosts": Network(16, 1, nic="host", rate_mbit_per_second=100, latency_ms_one_way=5),
}


def named_network(name: str) -> Network:
    """The network called `name`, or a one-line error that lists the known names."""
    try:
        return NETWORKS[name]
    except KeyError:
        known = ", ".join(NETWORKS)
        raise ConfigError(f"no network is called {name!r}; choose one of {known}{nearest(name, NETWORKS)}") from None
