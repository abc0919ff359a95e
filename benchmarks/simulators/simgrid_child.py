"""`python -m benchmarks.simulators.simgrid_child`: SimGrid's own process, JSON in and JSON out; `simgrid` starts it.

    root --- rack --- node --- worker        zones, all of them stars
       uplink |   NIC     port               links, split duplex
              `- the rack's gateway

Walk from worker 135 to 136, with 4 workers a node and 34 nodes a rack: port135 up, nic33 up, uplink0 up, uplink1 down,
nic34 down, port136 down. Every route that is used is compared with `fluid.Links.path` before anything is played: a
gateway in the wrong place makes SimGrid 3.32 take other links without a word.

Network model CM02 without cross-traffic and TCP's window. Its shares are fair as ours are, but for one thing: where
transfers of different latency share a link, those of the shorter path get more.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.simulators.fluid import Links
from benchmarks.simulators.simgrid import Play, find_simgrid
from benchmarks.simulators.simulate import Round
from megabatch.errors import ConfigError
from megabatch.plan.network import Network

__all__ = ["main"]

_CONFIG = ("network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:1e18")
_ENDLESS_BYTES = 1 << 60


def main() -> None:
    """Play what stdin asks for; the answer is the last line of stdout."""
    answer: dict[str, Any]
    try:
        request = json.load(sys.stdin)
        answer = _play_all(
            _load_simgrid(), Network(**request["network"]), [_read_play(one) for one in request["plays"]]
        )
    except Exception as error:  # whatever it is, the parent makes one line of it
        answer = {"error": str(error) or type(error).__name__}
    print(f"\n{json.dumps(answer)}", flush=True)


def _load_simgrid() -> Any:
    spec = find_simgrid()
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simgrid"] = module
    spec.loader.exec_module(module)
    return module


def _read_play(data: Mapping[str, Any]) -> Play:
    channels = tuple(
        tuple(Round(tuple((a, b) for a, b in one["pairs"]), one["share"], one["count"]) for one in channel)
        for channel in data["channels"]
    )
    background = tuple((a, b) for a, b in data["background"])
    return Play(channels, data["message_bytes"], data["free"], tuple(data["start_seconds"]), background)


def _play_all(simgrid: Any, network: Network, plays: Sequence[Play]) -> dict[str, Any]:
    engine = simgrid.Engine(["megabatch", *(f"--cfg={one}" for one in _CONFIG), "--log=root.thres:error"])
    pairs = {pair for one in plays for channel in one.channels for each in channel for pair in each.pairs}
    pairs |= {pair for one in plays for pair in one.background}
    world_size = 1 + max((max(pair) for pair in pairs), default=0)
    hosts = build_platform(simgrid, engine, network, world_size)
    assert_routes(hosts, Links(network, world_size), sorted(pairs))
    seconds: list[float] = []

    def conduct() -> None:
        for number, one in enumerate(plays):
            seconds.append(_free(simgrid, hosts, one, number) if one.free else _in_step(simgrid, hosts, one))

    _start_actor(simgrid, hosts[0], conduct)
    engine.run()
    return {"seconds": seconds, "version": simgrid.simgrid_version}


def build_platform(simgrid: Any, engine: Any, network: Network, world_size: int) -> list[Any]:
    """Hosts by rank. Every path crosses two ports: each carries half of the software's latency."""
    nodes = -(-world_size // network.workers_per_node)
    per_rack = network.nodes_per_rack or nodes
    port_latency = network.worker_latency + network.software_latency / 2
    root = _add_zone(simgrid, engine, None, "root")
    hosts: list[Any] = []
    for rack in range(-(-nodes // per_rack)):
        rack_zone = _add_zone(simgrid, engine, root, f"rack{rack}")
        gateway = add_rack_gateway(simgrid, engine, rack_zone, rack)
        for node in range(rack * per_rack, min(nodes, (rack + 1) * per_rack)):
            node_zone = _add_zone(simgrid, engine, rack_zone, f"node{node}")
            router = _add(node_zone, "router", f"router{node}")
            for rank in range(len(hosts), min(world_size, (node + 1) * network.workers_per_node)):
                hosts.append(_add(node_zone, "host", f"worker{rank}", 1e9))
                port = _links(simgrid, node_zone, f"port{rank}", network.worker_rate, port_latency)
                _attach(node_zone, hosts[-1], None, port)
            nic = _links(simgrid, rack_zone, f"nic{node}", network.nic_rate, network.nic_latency)
            _attach(rack_zone, node_zone, router, nic)
        uplink = []
        if network.nodes_per_rack:
            uplink = _links(simgrid, root, f"uplink{rack}", network.rack_rate, network.rack_latency)
        _attach(root, rack_zone, gateway, uplink)
    root.seal()
    return hosts


def add_rack_gateway(simgrid: Any, engine: Any, rack_zone: Any, rack: int) -> Any:
    """The way out of a rack. 3.32 takes wrong links unless it lies in a zone of its own, 4.1 finds it only without."""
    if _is_new(rack_zone):
        return _add(rack_zone, "router", f"gateway{rack}")
    zone = _add_zone(simgrid, engine, rack_zone, f"switch{rack}")
    gateway = _add(zone, "router", f"gateway{rack}")
    _attach(rack_zone, zone, gateway, [])
    return gateway


def assert_routes(hosts: Sequence[Any], links: Links, pairs: Iterable[tuple[int, int]]) -> None:
    """Raise unless SimGrid's route of every pair has the links, their rates and the latency that we count on."""
    nodes = -(-links.world_size // links.network.workers_per_node)
    # `Links` numbers ports, NICs and uplinks in this order; there are at most as many racks as nodes.
    kinds = (("port", links.world_size), ("nic", nodes), ("uplink", nodes))
    names = [f"{kind}{at}_{way}" for kind, count in kinds for at in range(count) for way in ("UP", "DOWN")]
    rates = links.capacities
    for source, target in pairs:
        path, latency = links.path(source, target)
        route, found_latency = hosts[source].route_to(hosts[target])
        wanted = {names[number]: float(rates[number]) for number in path}
        found = {link.name: link.bandwidth for link in route}
        if found != wanted or len(route) != len(path) or not math.isclose(found_latency, latency, abs_tol=1e-12):
            taken, needed = (" ".join(f"{name}={rate:.3g}" for name, rate in one.items()) for one in (found, wanted))
            raise ConfigError(
                f"wrong route from worker {source} to {target}: {taken} with {1e6 * found_latency:.3g} us, "
                f"needed {needed} with {1e6 * latency:.3g} us"
            )


def _in_step(simgrid: Any, hosts: Sequence[Any], one: Play) -> float:
    total = 0.0
    for channel in one.channels:
        for each in channel:
            began, size = simgrid.Engine.clock, _size(each, one)
            for transfer in [simgrid.Comm.sendto_async(hosts[a], hosts[b], size) for a, b in each.pairs]:
                transfer.wait()
            total += each.count * (simgrid.Engine.clock - began)
    return total


def _free(simgrid: Any, hosts: Sequence[Any], one: Play, number: int) -> float:
    """Each rank of each channel is an actor. Mailboxes have receivers, so messages travel before they are asked for."""
    began, actors = simgrid.Engine.clock, []
    others = [simgrid.Comm.sendto_async(hosts[a], hosts[b], _ENDLESS_BYTES) for a, b in one.background]
    for index, channel in enumerate(one.channels):
        parts: dict[int, list[tuple[Round, list[Any], list[Any]]]] = {}
        to_rank: dict[int, set[Any]] = {}
        for each in channel:
            ends: dict[int, tuple[Round, list[Any], list[Any]]] = {}
            for a, b in each.pairs:
                box = simgrid.Mailbox.by_name(f"play {number} channel {index}: {a} to {b}")
                ends.setdefault(a, (each, [], []))[1].append(box)
                ends.setdefault(b, (each, [], []))[2].append(box)
            for rank, part in ends.items():
                parts.setdefault(rank, []).append(part)
                to_rank.setdefault(rank, set()).update(part[2])
        for rank, mine in parts.items():
            start = began + (one.start_seconds[rank] if one.start_seconds else 0.0)
            actor = _start_actor(simgrid, hosts[rank], _run_rank, simgrid, one, mine, start)
            for box in to_rank[rank]:
                box.set_receiver(actor)
            actors.append(actor)
    for actor in actors:
        actor.join()
    for other in others:
        other.cancel()
    return max(float(simgrid.Engine.clock - began), *one.start_seconds, 0.0)


def _run_rank(simgrid: Any, one: Play, parts: Sequence[tuple[Round, list[Any], list[Any]]], start: float) -> None:
    simgrid.this_actor.sleep_until(start)
    for each, to_others, to_me in parts:
        size = _size(each, one)
        for _ in range(each.count):
            sent = [box.put_async(0, size) for box in to_others]
            # 3.32 gives a transfer and the place for its content, which must be kept until the end; 4.1 a transfer.
            received = [box.get_async() for box in to_me]
            for transfer in sent:
                transfer.wait()
            for got in received:
                (got[0] if isinstance(got, tuple) else got).wait()


def _size(each: Round, one: Play) -> int:
    return max(1, round(each.share * one.message_bytes))


# What 3.32 and 4.1 call differently.


def _is_new(zone: Any) -> bool:
    return hasattr(zone, "add_netzone_star")


def _add_zone(simgrid: Any, engine: Any, parent: Any, name: str) -> Any:
    if _is_new(simgrid.NetZone):
        return (parent or engine.netzone_root).add_netzone_star(name)
    zone = simgrid.NetZone.create_star_zone(name)
    return zone.set_parent(parent) if parent is not None else zone


def _add(zone: Any, what: str, *words: Any) -> Any:
    make = getattr(zone, f"add_{what}", None) or getattr(zone, f"create_{what}")
    return make(*words)


def _links(simgrid: Any, zone: Any, name: str, rate: float, latency: float) -> list[Any]:
    link = _add(zone, "split_duplex_link", name, rate).set_latency(latency)
    return [simgrid.LinkInRoute(link, simgrid.LinkInRoute.Direction.UP)]


def _attach(zone: Any, member: Any, gateway: Any, links: Sequence[Any]) -> None:
    """The way from a member of a zone to all others, and back."""
    if _is_new(zone):
        if gateway is not None:
            member.set_gateway(gateway)
        zone.add_route(member, None, list(links), True)
    else:
        zone.add_route(member.netpoint, None, gateway, None, list(links), True)


def _start_actor(simgrid: Any, host: Any, work: Any, *words: Any) -> Any:
    if hasattr(host, "add_actor"):
        return host.add_actor("actor", work, *words)
    return simgrid.Actor.create("actor", host, work, *words)


if __name__ == "__main__":
    main()
