"""Looks over a joined world before training: who sits where, how fast each line of the grid is, which link is slow.

A line is slow when its rate is below half of the median of its axis. All lines of an axis are measured at once, so a
line can only fall behind through its own links, not by waiting for its turn. Plain data in the form of
`megabatch doctor`: `name`, `good` (None: just a fact) and `text`; printing is left to others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megabatch.comm.grid import ProcessGrid
from megabatch.comm.measure import AxisMeasurement, measure_axis
from megabatch.comm.shape import GridShape, ranks_text
from megabatch.train.world import choose_device, join, read_world

__all__ = ["Finding", "axis_findings", "examine_joined_world", "examine_world", "slow_lines", "world_map"]

Finding = dict[str, Any]

_SLOW = 0.5
_TIMEOUT_SECONDS = 120.0
_MAX_HOSTS_SHOWN = 16
_MAX_LINE_HOSTS_SHOWN = 8


def examine_joined_world(environ: Mapping[str, str]) -> tuple[list[Finding], bool]:
    """Findings about the world a launcher has made, and whether this process is the one to print them."""
    world = read_world(environ, alone=True)
    if world is None or world.size == 1:
        return [], True
    _, backend = choose_device("auto", world)
    with join(world, backend, _TIMEOUT_SECONDS):
        return examine_world(ProcessGrid.build(timeout_seconds=_TIMEOUT_SECONDS)), world.is_main


def examine_world(grid: ProcessGrid, *, budget_seconds: float = 2.0) -> list[Finding]:
    """The map of the world, then each axis, then each slow line; all ranks must call it and get the same.

    Raises:
        CommunicationError: a rank died or did not answer in time.
    """
    axes = grid.shape.axes
    findings = world_map(grid.shape, grid.hosts, grid.reason)
    for axis in axes:
        measured = measure_axis(grid, axis, budget_seconds=budget_seconds / len(axes))
        findings += axis_findings(measured, grid.shape.names[axis], grid.hosts)
    return findings


def world_map(shape: GridShape, hosts: Sequence[str], reason: str = "as given") -> list[Finding]:
    """Which ranks sit on which host, and where in the grid. `hosts` is by rank, or empty when nobody asked."""
    findings: list[Finding] = [
        {"name": "grid", "good": None, "text": f"{shape.text}, {shape.world_size} ranks ({reason})"}
    ]
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    for host, ranks in list(by_host.items())[:_MAX_HOSTS_SHOWN]:
        text = f"{host}: {ranks_text(ranks)} at {_position(shape, ranks[0])} to {_position(shape, ranks[-1])}"
        findings.append({"name": "host", "good": None, "text": text})
    if len(by_host) > _MAX_HOSTS_SHOWN:
        findings.append({"name": "host", "good": None, "text": f"and {len(by_host) - _MAX_HOSTS_SHOWN} more hosts"})
    across = [axis for axis in range(len(shape.sizes)) if _crosses_hosts(shape, axis, hosts)]
    fast = max(shape.axes, default=0)
    if fast in across and len(by_host) < shape.world_size:
        text = (
            f"{shape.names[fast]}s cross hosts though hosts hold several ranks; "
            "the last number of the grid should be the ranks of a host"
        )
        findings.append({"name": "layout", "good": False, "text": text})
    return findings


def axis_findings(measured: AxisMeasurement, name: str, hosts: Sequence[str]) -> list[Finding]:
    """One line for the axis, and one for each of its slow lines."""
    rates, latencies = measured.bytes_per_second, measured.latency_seconds
    sharing = measured.cost(name).ranks_per_link
    text = (
        f"{len(measured.lines)} {name}s of {len(measured.lines[0])} ranks, {_range(latencies, 1e3, 'ms')}, "
        f"{_range(rates, 1e-6, 'MB/s')} with all at once"
    )
    if sharing >= 1.5:
        text += f"; one alone is {sharing:.1f} times as fast, so they share a link"
    slow = slow_lines(measured)
    findings: list[Finding] = [{"name": name, "good": not slow, "text": text}]
    for line in slow:
        on = sorted({hosts[rank] for rank in measured.lines[line]}) if hosts else []
        more = " ..." if len(on) > _MAX_LINE_HOSTS_SHOWN else ""
        where = f" (hosts {', '.join(on[:_MAX_LINE_HOSTS_SHOWN])}{more})" if on else ""
        slow_text = (
            f"{name} of {ranks_text(measured.lines[line])}{where} has {1e-6 * rates[line]:.4g} MB/s, "
            f"the median {name} {1e-6 * statistics.median_high(rates):.4g}; look at its links and other load"
        )
        findings.append({"name": "slow link", "good": False, "text": slow_text})
    return findings


def slow_lines(measured: AxisMeasurement) -> list[int]:
    """Numbers of the lines below half of the median rate of their axis; of two, the upper one is the median."""
    median = statistics.median_high(measured.bytes_per_second)
    return [line for line, rate in enumerate(measured.bytes_per_second) if rate < _SLOW * median]


def _crosses_hosts(shape: GridShape, axis: int, hosts: Sequence[str]) -> bool:
    return any(len({hosts[other] for other in shape.axis_ranks(rank, axis)}) > 1 for rank in range(len(hosts)))


def _position(shape: GridShape, rank: int) -> str:
    return "(" + ", ".join(str(along) for along in shape.coordinates(rank)) + ")"


def _range(values: Sequence[float], factor: float, unit: str) -> str:
    scaled = [factor * value for value in (min(values), max(values))]
    low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in scaled)
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
