"""Measures the emulator itself, so that a benchmark run in it measures the algorithm and not the laboratory."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .laboratory import Laboratory
from .namespaces import inside
from .network import Network
from .traffic import round_trip_seconds, stream_rates

__all__ = ["Finding", "check_laboratory", "column_pairs", "lateness_quantile_us", "payload_mbit_per_second", "render"]

RATE_TOLERANCE = 0.10
ROUND_TRIP_TOLERANCE_MS = 0.5
BUSY_CORES = 0.9  # one thread carries all packets: close to a whole core it is the bottleneck
STRAY_BYTES = 20_000  # echo replies and closing handshakes that may still pass a NIC during the local stream

_HEADER_BYTES = 52  # IPv4 20, TCP 20, timestamps 12


@dataclass(frozen=True)
class Finding:
    """One measured quantity; `good` is None where there is nothing to hold it against."""

    name: str
    measured: float
    unit: str
    nominal: float | None = None
    good: bool | None = None


def payload_mbit_per_second(network: Network) -> float:
    """What a TCP stream can carry when its packets fill the NIC's rate."""
    return network.rate_mbit_per_second * (network.mtu - _HEADER_BYTES) / network.mtu


def column_pairs(network: Network) -> list[tuple[int, int]]:
    """Station pairs of a torus's column phase: every rank sends to the rank below it, on another host.

    With several ranks per host a column runs over the hosts at equal local rank; with one rank per host the world is
    taken as the squarest grid, so that the stream goes to the host one row further on.
    """
    stations = network.stations
    if network.ranks_per_host > 1:
        row = len(stations) // network.hosts
    else:
        row = max(d for d in range(1, math.isqrt(network.hosts) + 1) if network.hosts % d == 0)
    return [(station.index, (station.index + row) % len(stations)) for station in stations for _ in station.ranks]


def check_laboratory(lab: Laboratory, seconds: float = 3.0) -> list[Finding]:
    """Latency, one stream, all NICs at once, the local path, and how busy the emulator was."""
    network = lab.network
    findings: list[Finding] = []
    retransmitted, stolen, start = _retransmitted(lab), _stolen_seconds(), time.monotonic()
    if network.ranks_per_host > 1:
        findings += _local_stream(lab, seconds)  # first: nothing else may still be on its way through a NIC
    if network.hosts > 1:
        far = len(network.stations) // network.hosts
        findings += [_round_trip(lab, far), _one_stream(lab, far, seconds), *_all_nics(lab, seconds)]
    dropped = sum(nic.dropped_packets for nic in lab.nic_counters())
    dropped += sum(nic["dropped_packets"] for nic in lab.links.health().get("nics", []))
    findings.append(Finding("packets dropped anywhere", dropped, "", 0, dropped == 0))
    findings.append(Finding("TCP segments sent twice", _retransmitted(lab) - retransmitted, ""))
    # The two usual reasons for numbers out of bounds: other work on the machine, and a busy hypervisor below it.
    findings.append(Finding("machine load average, 1 min", os.getloadavg()[0], ""))
    stolen = (_stolen_seconds() - stolen) / (time.monotonic() - start)
    findings.append(Finding("stolen by the hypervisor", stolen, "cores"))
    return findings


def _round_trip(lab: Laboratory, far: int) -> Finding:
    nominal = 2 * lab.network.latency_ms_one_way
    measured = 1000 * statistics.median(round_trip_seconds(lab, 0, far, count=50))
    good = abs(measured - nominal) <= ROUND_TRIP_TOLERANCE_MS
    return Finding("echo round trip, idle, median of 50", measured, "ms", nominal, good)


def _rate_finding(lab: Laboratory, name: str, bytes_per_second: float, share: float = 1.0) -> Finding:
    measured = bytes_per_second * 8e-6
    nominal = payload_mbit_per_second(lab.network) * share
    if not nominal:
        return Finding(name, measured, "Mbit/s")
    good = abs(measured - nominal) <= RATE_TOLERANCE * nominal
    return Finding(name, measured, "Mbit/s", nominal, good)


def _one_stream(lab: Laboratory, far: int, seconds: float) -> Finding:
    return _rate_finding(lab, "one TCP stream, host to host", stream_rates(lab, [(0, far)], seconds)[0])


def _all_nics(lab: Laboratory, seconds: float) -> list[Finding]:
    """Load every NIC in both directions and watch the emulator meanwhile."""
    pairs = column_pairs(lab.network)
    before, start = lab.links.health(), time.monotonic()
    rates = stream_rates(lab, pairs, seconds, warm_up_seconds=1.0)
    after, elapsed = lab.links.health(), time.monotonic() - start
    per_nic = [0.0] * len(lab.network.stations)
    for (source, _), rate in zip(pairs, rates, strict=True):
        per_nic[source] += rate
    findings = [
        _rate_finding(lab, "column phase, slowest NIC", min(per_nic)),
        _rate_finding(lab, "column phase, median NIC", statistics.median(per_nic)),
        _rate_finding(lab, "column phase, all NICs together", sum(per_nic), share=len(per_nic)),
    ]
    if after:
        findings += _emulator(before, after, elapsed)
    return findings


def _emulator(before: dict[str, Any], after: dict[str, Any], elapsed: float) -> list[Finding]:
    cores = (after["cpu_seconds"] - before["cpu_seconds"]) / elapsed
    packets = sum(n["sent_packets"] for n in after["nics"]) - sum(n["sent_packets"] for n in before["nics"])
    late = [a - b for a, b in zip(after["late_histogram"], before["late_histogram"], strict=True)]
    return [
        Finding("column phase, packets forwarded", packets / elapsed, "1/s"),
        Finding("column phase, forwarder CPU", cores, "cores", BUSY_CORES, cores < BUSY_CORES),
        Finding("delivery late by, median below", lateness_quantile_us(late, 0.5), "us"),
        Finding("delivery late by, 99 % below", lateness_quantile_us(late, 0.99), "us"),
        Finding("delivery late by, worst", after["late_us_max"], "us"),
    ]


def lateness_quantile_us(histogram: Sequence[int], share: float) -> int:
    """Upper edge of the bucket below which `share` of the packets lie; bucket b counts [2^(b-1), 2^b) us."""
    needed = share * sum(histogram)
    seen = 0
    for bucket, count in enumerate(histogram):
        seen += count
        if seen >= needed and seen:
            return 1 << bucket
    return 0


def _local_stream(lab: Laboratory, seconds: float) -> list[Finding]:
    """A stream between two ranks of host 0, which must not touch any NIC."""
    other = 1 if lab.network.nic == "rank" else 0
    before = lab.nic_counters()
    rate = stream_rates(lab, [(0, other)], seconds)[0]
    stray = sum(now.since(then).sent_bytes for now, then in zip(lab.nic_counters(), before, strict=True))
    return [
        Finding("one TCP stream, within a host", rate * 8e-6, "Mbit/s"),
        Finding("of that, seen by any NIC", stray, "bytes", 0, stray < STRAY_BYTES),
    ]


def _retransmitted(lab: Laboratory) -> int:
    total = 0
    for namespace in lab.namespaces:
        with inside(namespace):
            lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        total += int(values[names.index("RetransSegs")])
    return total


def _stolen_seconds() -> float:
    """CPU time that the hypervisor gave to somebody else, summed over the CPUs (field 8 of /proc/stat's first line)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def render(title: str, findings: list[Finding]) -> str:
    """The findings as a plain table."""
    verdicts = {True: "ok", False: "OUT OF BOUNDS", None: ""}
    lines = [title]
    for finding in findings:
        nominal = "" if finding.nominal is None else f"{finding.nominal:,.2f}"
        lines.append(
            f"  {finding.name:<36}{finding.measured:>14,.2f} {finding.unit:<7}{nominal:>10}  "
            f"{verdicts[finding.good]}".rstrip()
        )
    return "\n".join(lines)
