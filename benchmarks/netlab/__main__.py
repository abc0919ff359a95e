"""Command line of the network laboratory.

python -m benchmarks.netlab --network shared-nic -- python script.py ...    a command on every rank
python -m benchmarks.netlab --network shared-nic --torchrun -- python script.py ...   the same under torchrun
python -m benchmarks.netlab --check                                         is the emulator up to its networks?
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import FrameType

from megabatch.errors import CommunicationError, ConfigError, MegabatchError

from .check import check_laboratory, render
from .laboratory import Laboratory, NicCounters, laboratory
from .network import NETWORKS, Network, named_network
from .ranks import check_ranks

__all__ = ["main"]

_GRACE_SECONDS = 10.0  # after one rank failed, the others may still say why


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", help=f"one of {', '.join(NETWORKS)}; default shared-nic, all for --check")
    parser.add_argument("--hosts", type=int, help="change the network: number of hosts")
    parser.add_argument("--ranks-per-host", type=int)
    parser.add_argument("--nic", choices=["host", "rank"], help="one NIC for all ranks of a host, or one each")
    parser.add_argument("--rate", type=float, metavar="MBIT/S", help="rate of a NIC, each direction; 0 unlimited")
    parser.add_argument("--latency", type=float, metavar="MS", help="one way")
    parser.add_argument("--mtu", type=int, metavar="BYTES")
    parser.add_argument("--link", choices=["auto", "forwarder", "kernel"], default="auto")
    parser.add_argument("--check", action="store_true", help="measure the emulator instead of running a command")
    parser.add_argument("--torchrun", action="store_true", help="start torchrun on every host instead of bare ranks")
    parser.add_argument("--counters", action="store_true", help="print what passed each NIC, to stderr")
    parser.add_argument("--json", action="store_true", help="print the check as JSON")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what every rank runs")
    return parser


def _networks(options: argparse.Namespace) -> dict[str, Network]:
    changes = {
        "hosts": options.hosts,
        "ranks_per_host": options.ranks_per_host,
        "nic": options.nic,
        "rate_mbit_per_second": options.rate,
        "latency_ms_one_way": options.latency,
        "mtu": options.mtu,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if options.check and options.network is None and not changes:
        return dict(NETWORKS)
    name = options.network or "shared-nic"
    network = named_network(name)
    return {f"{name}, changed": replace(network, **changes)} if changes else {name: network}


def _check(networks: dict[str, Network], options: argparse.Namespace) -> int:
    results: dict[str, object] = {}
    all_good = True
    for name, network in networks.items():
        with laboratory(network, link=options.link) as lab:
            findings = check_laboratory(lab)
        all_good &= all(finding.good is not False for finding in findings)
        if options.json:
            rows = [asdict(finding) for finding in findings]
            results[name] = {"network": asdict(network), "link": lab.links.kind, "findings": rows}
        else:
            print(render(f"{name}: {network.describe()}; {lab.links.kind} links", findings), flush=True)
    if options.json:
        print(json.dumps(results, indent=2))
    return 0 if all_good else 1


def _counter_table(lab: Laboratory, before: Sequence[NicCounters]) -> str:
    lines = ["NIC            ranks          bytes sent   bytes received   dropped"]
    for station, now, then in zip(lab.network.stations, lab.nic_counters(), before, strict=True):
        passed = now.since(then)
        ranks = ",".join(map(str, station.ranks))
        lines.append(
            f"{station.address:<15}{ranks:<12}{passed.sent_bytes:>13,}{passed.received_bytes:>17,}"
            f"{passed.dropped_packets:>10,}"
        )
    return "\n".join(lines)


def _run(network: Network, argv: Sequence[str], options: argparse.Namespace) -> int:
    with laboratory(network, link=options.link) as lab:
        before = lab.nic_counters()
        run = lab.run_torchrun if options.torchrun else lab.run_ranks
        completed = run(argv, timeout_seconds=options.timeout, live_rank=0, grace_seconds=_GRACE_SECONDS)
        if options.counters:
            print(_counter_table(lab, before), file=sys.stderr)
    check_ranks(completed, argv)
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when all is well, 1 when a rank or a check failed, 2 for a user's mistake."""
    options = _parser().parse_args(arguments)
    argv = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if not options.check and not argv:
            raise ConfigError("no command given; write it after '--', or ask for --check")
        networks = _networks(options)
        if options.check:
            return _check(networks, options)
        return _run(next(iter(networks.values())), argv, options)
    except MegabatchError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1 if isinstance(error, CommunicationError) else 2
    except KeyboardInterrupt:
        print("netlab: interrupted; the network is gone", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
