"""Joins the stations: by TUN devices and the forwarder, or by the kernel's own veth and netem.

    forwarder   station nic0 (TUN, tbf) ---- forwarder: latency, ingress rate ---- nic0 (TUN) station
    kernel      station nic0 (veth, tbf) --- switch namespace: routes; port (netem: latency, rate) --- nic0 station

In both, `tbf` in the sending station shapes to the NIC's rate. Its queue is the station's own, so TCP feels it at once
and keeps it short, as on a real machine. A queue in the emulator alone would swell by a whole TCP window per stream and
delay every small message behind it: Gloo's all-reduce of 10 MB was seen a fifth slower that way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal, Protocol

from megabatch.errors import LaunchError

from .forwarder import Forwarder, open_tun
from .namespaces import Namespace, create_namespace, inside, run_batch, write_sysctl
from .network import ADDRESS_RANGE, NIC_NAME, Network

__all__ = ["LinkKind", "Links", "egress_shaper", "has_netem", "join_stations", "wire_neighbours"]

LinkKind = Literal["auto", "forwarder", "kernel"]

_SWITCH_QUEUE_PACKETS = 50_000
_MAC = "02:4d:42:00:00:01"  # equal at both ends of every veth, so that no address resolution is needed

_STATION_SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    # bbr, the default on some machines, drops to four packets every ten seconds and learns its rate slowly;
    # cubic may not be chosen in a namespace everywhere; reno on a network without loss just fills the pipe.
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",  # a training step computes between messages; the window must survive it
    # With the usual 128 KB a stream was seen to stay at a quarter of its NIC's rate for seconds: its window was
    # smaller than the pipe, and grew too slowly. Clusters are tuned like this too.
    "ipv4/tcp_rmem": "4096 1048576 33554432",
    "ipv4/tcp_no_metrics_save": "1",  # no memory of earlier connections: every run starts alike
}


class Links(Protocol):
    """What joins the stations."""

    kind: Literal["forwarder", "kernel"]

    def health(self) -> dict[str, Any]:
        """What the emulator says about itself; empty when it is the kernel."""

    def cut(self, index: int) -> None:
        """Silently lose everything station `index` sends or should receive through its NIC."""

    def join(self, index: int) -> None:
        """Undo `cut`."""

    def close(self) -> None:
        """Take the links away."""


def has_netem() -> bool:
    """Whether this kernel can delay packets itself (tried in a throw-away namespace)."""
    scratch = create_namespace("netem-trial")
    try:
        with inside(scratch):
            run_batch("tc", ["qdisc add dev lo root netem delay 1ms"])
    except LaunchError:
        return False
    finally:
        scratch.close()
    return True


def join_stations(network: Network, stations: Sequence[Namespace], kind: LinkKind) -> Links:
    """Give every station its NIC and connect them all."""
    for namespace in stations:
        with inside(namespace):
            for name, value in _STATION_SETTINGS.items():
                write_sysctl(name, value)
    if kind == "auto":
        kind = "kernel" if has_netem() else "forwarder"
    links: Links = KernelLinks(network, stations) if kind == "kernel" else ForwarderLinks(network, stations)
    try:
        for station, namespace in zip(network.stations, stations, strict=True):
            with inside(namespace):
                run_batch(
                    "ip",
                    [
                        f"address add {station.address}/32 dev {NIC_NAME}",
                        f"link set {NIC_NAME} mtu {network.mtu} txqueuelen 10000 up",
                        f"route add {ADDRESS_RANGE} dev {NIC_NAME} src {station.address}",
                    ],
                )
                if network.rate_mbit_per_second:
                    run_batch("tc", [f"qdisc add {egress_shaper(network, network.rate_mbit_per_second)}"])
        wire_neighbours(network, stations)
    except BaseException:
        links.close()
        raise
    return links


def egress_shaper(network: Network, rate_mbit_per_second: float) -> str:
    """The tc words that make a station send at the given rate; bursts are two packets or two milliseconds.

    A bucket of that depth makes up for a kernel timer that comes late on a busy machine.
    """
    bytes_per_second = rate_mbit_per_second * 1e6 / 8
    burst_bytes = max(2 * network.mtu, round(bytes_per_second * 0.002))
    return f"dev {NIC_NAME} root tbf rate {round(bytes_per_second * 8)}bit burst {burst_bytes} limit {16 * 2**20}"


def wire_neighbours(network: Network, stations: Sequence[Namespace]) -> None:
    """Connect the stations of one host pairwise and directly: they share a machine, not a network."""
    for station in network.stations:
        for other in network.neighbours(station):
            if other.index < station.index:
                continue
            with inside(stations[station.index]):
                there = stations[other.index].paths[0]
                here_name, there_name = f"local{other.index}", f"local{station.index}"
                run_batch("ip", [_veth(here_name, there_name, there, 65535)])
            for namespace, name, own, peer in (
                (stations[station.index], here_name, station, other),
                (stations[other.index], there_name, other, station),
            ):
                with inside(namespace):
                    run_batch(
                        "ip",
                        [
                            f"link set {name} arp off up",
                            f"route add {peer.address}/32 dev {name} src {own.address}",
                        ],
                    )


def _veth(name: str, peer_name: str, peer_namespace: str, mtu: int) -> str:
    return (
        f"link add {name} address {_MAC} mtu {mtu} type veth "
        f"peer name {peer_name} address {_MAC} mtu {mtu} netns {peer_namespace}"
    )


class ForwarderLinks:
    """Every NIC is a TUN device; one user-space program carries the packets."""

    kind: Literal["forwarder", "kernel"] = "forwarder"

    def __init__(self, network: Network, stations: Sequence[Namespace]) -> None:
        """Create the TUN devices and start the program, which from then on is their only owner."""
        tun_fds: list[int] = []
        try:
            for namespace in stations:
                with inside(namespace):
                    tun_fds.append(open_tun())
            self.forwarder = Forwarder(network, tun_fds)
        finally:
            for fd in tun_fds:
                os.close(fd)

    def health(self) -> dict[str, Any]:
        """The forwarder's counters."""
        return self.forwarder.counters()

    def cut(self, index: int) -> None:
        """Drop in the forwarder: no error reaches either side, as with a pulled cable."""
        self.forwarder.cut(index)

    def join(self, index: int) -> None:
        """Undo `cut`."""
        self.forwarder.join(index)

    def close(self) -> None:
        """End the program; the TUN devices go with it."""
        self.forwarder.close()


class KernelLinks:
    """Every NIC is a veth pair into a switch namespace, whose ports delay and shape what goes to the station."""

    kind: Literal["forwarder", "kernel"] = "kernel"

    def __init__(self, network: Network, stations: Sequence[Namespace]) -> None:
        """Build the switch."""
        self._network = network
        with ExitStack() as undo:
            self._switch = create_namespace("switch")
            undo.callback(self._switch.close)
            with inside(self._switch):
                write_sysctl("ipv6/conf/all/disable_ipv6", "1")
                write_sysctl("ipv4/conf/all/rp_filter", "0")
                write_sysctl("ipv4/conf/default/rp_filter", "0")
                write_sysctl("ipv4/ip_forward", "1")
            for station, namespace in zip(network.stations, stations, strict=True):
                port = f"port{station.index}"
                with inside(namespace):
                    run_batch(
                        "ip",
                        [
                            _veth(NIC_NAME, port, self._switch.paths[0], network.mtu),
                            f"link set {NIC_NAME} arp off",
                        ],
                    )
                with inside(self._switch):
                    run_batch("ip", [f"link set {port} arp off up", f"route add {station.address}/32 dev {port}"])
                    run_batch("tc", [f"qdisc add {words}" for words in port_shaper(network, port)])
            undo.pop_all()

    def health(self) -> dict[str, Any]:
        """Nothing to say: no process of ours carries the packets."""
        return {}

    def cut(self, index: int) -> None:
        """Lose both directions in the switch: no error reaches either side, as with a pulled cable."""
        self._rule("add", index)

    def join(self, index: int) -> None:
        """Undo `cut`."""
        self._rule("del", index)

    def _rule(self, verb: str, index: int) -> None:
        address = self._network.stations[index].address
        with inside(self._switch):
            run_batch("ip", [f"rule {verb} iif port{index} blackhole", f"rule {verb} to {address}/32 blackhole"])

    def close(self) -> None:
        """Let the switch go; its veth pairs go with it."""
        self._switch.close()


def port_shaper(network: Network, port: str) -> list[str]:
    """The tc words for the switch port towards a station: latency and ingress rate."""
    rate = f"rate {round(network.rate_mbit_per_second * 1e6)}bit" if network.rate_mbit_per_second else ""
    if network.latency_ms_one_way:
        delay_us = round(network.latency_ms_one_way * 1000)
        return [f"dev {port} root netem delay {delay_us}us {rate} limit {_SWITCH_QUEUE_PACKETS}".replace("  ", " ")]
    if rate:
        return [f"dev {port} root tbf {rate} burst {2 * network.mtu} limit {16 * 2**20}"]
    return []
