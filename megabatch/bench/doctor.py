"""Looks over the machine and the joined world before anybody waits for a run: `megabatch doctor`.

In a world: who sits where, how fast each line of the grid is, which link is slow. A line is slow when its rate is below
half of the median of its axis. All lines of an axis are measured at once, so a line can only fall behind through its
own links, not by waiting for its turn.
"""

from __future__ import annotations

import platform
import shutil
import socket
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console

from megabatch.comm.grid import ProcessGrid
from megabatch.comm.measure import AxisMeasurement, measure_axis
from megabatch.comm.shape import GridShape, ranks_text
from megabatch.data.idx import find_fashion_mnist
from megabatch.errors import DataError, LaunchError
from megabatch.files import default_cache
from megabatch.machine import usable_cores
from megabatch.train.describe import describe_kernels, installed_version
from megabatch.workers.meeting import join
from megabatch.workers.world import choose_device, read_world

Finding = dict[str, Any]  # `name`, `good` (None: just a fact) and `text`

_SLOW = 0.5
_TIMEOUT_SECONDS = 120.0
_MAX_HOSTS_SHOWN = 16
_MAX_LINE_HOSTS_SHOWN = 8


def examine_machine(environ: Mapping[str, str]) -> list[Finding]:
    """Findings about this process's machine and launcher, in the order a person would ask."""
    memory_gb = psutil.virtual_memory().total / 1e9
    devices = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    is_there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    backends = [name for name, asked in is_there.items() if dist.is_available() and asked()]
    return [
        _finding("software", None, f"python {platform.python_version()}, {_versions()}"),
        _finding("host", None, f"{socket.gethostname()}, {usable_cores()} cores, {memory_gb:.1f} GB of memory"),
        _finding("accelerators", None, ", ".join(devices) or "none: training runs on the CPU"),
        *([_finding("kernels", None, _kernels())] if devices else []),
        _finding("backends", bool(backends), ", ".join(backends) or "none: this torch cannot communicate"),
        _launcher(environ),
        _host_name(),
        _data(),
        _disk(Path.cwd()),
    ]


def print_findings(findings: list[Finding], console: Console | None = None) -> None:
    console = console or Console(highlight=False, soft_wrap=True)
    marks = {True: "[green]ok  [/]", False: "[red]bad [/]", None: "    "}
    for finding in findings:
        console.print(f"{marks[finding['good']]}{finding['name']:<14}", end="")
        console.print(finding["text"], markup=False)


def _finding(name: str, good: bool | None, text: str) -> Finding:
    return {"name": name, "good": good, "text": text}


def _versions() -> str:
    names = ("megabatch", "torch", "numpy", "safetensors", "timm")
    return ", ".join(f"{name} {installed_version(name) or 'not installed'}" for name in names)


def _kernels() -> str:
    told = ", ".join(f"{name} {value}" for name, value in describe_kernels().items())
    return f"{told}; training sets cudnn_benchmark, or deterministic kernels with exact sums"


def _launcher(environ: Mapping[str, str]) -> Finding:
    try:
        world = read_world(environ)
    except LaunchError as error:
        return _finding("launcher", False, str(error))
    if world is None:
        return _finding("launcher", None, "none: `megabatch train` starts local workers itself")
    text = (
        f"{world.launcher}: rank {world.rank} of {world.size}, "
        f"local rank {world.local_rank} of {world.local_size} on this host, "
        f"meeting at {world.meeting_host}:{world.meeting_port}"
    )
    return _finding("launcher", True, text)


def _host_name() -> Finding:
    """Whether this host can find itself by name, which Gloo needs to choose the address it listens on."""
    name = socket.gethostname()
    try:
        return _finding("host name", True, f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        remedy = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface to use"
        return _finding("host name", False, f"'{name}' has no address; {remedy}")


def _data() -> Finding:
    try:
        return _finding("fashion-mnist", True, str(find_fashion_mnist(default_cache())))
    except DataError:
        return _finding("fashion-mnist", None, "not here yet; `megabatch data get fashion-mnist` gets it")


def _disk(folder: Path) -> Finding:
    free_gb = shutil.disk_usage(folder).free / 1e9
    is_enough = free_gb > 1.0
    text = f"{free_gb:.1f} GB free in {folder}"
    return _finding("disk", is_enough, text if is_enough else f"{text}; checkpoints need room")


def examine_joined_world(environ: Mapping[str, str]) -> tuple[list[Finding], bool]:
    """Findings about the world a launcher has made, and whether this process is the one to print them."""
    world = read_world(environ, alone=True)
    if world is None or world.size == 1:
        return [], True
    device, backend = choose_device("auto", world)
    with join(world, backend, _TIMEOUT_SECONDS, device), ProcessGrid.build(timeout_seconds=_TIMEOUT_SECONDS) as grid:
        return examine_world(grid), world.is_main


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
    findings = [_finding("grid", None, f"{shape.text}, {shape.world_size} ranks ({reason})")]
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    for host, ranks in list(by_host.items())[:_MAX_HOSTS_SHOWN]:
        text = f"{host}: {ranks_text(ranks)} at {_position(shape, ranks[0])} to {_position(shape, ranks[-1])}"
        findings.append(_finding("host", None, text))
    if len(by_host) > _MAX_HOSTS_SHOWN:
        findings.append(_finding("host", None, f"and {len(by_host) - _MAX_HOSTS_SHOWN} more hosts"))
    fast = max(shape.axes, default=0)
    if hosts and len(by_host) < shape.world_size and shape.crosses_hosts(fast, hosts):
        text = (
            f"{shape.names[fast]}s cross hosts though hosts hold several ranks; "
            "the last number of the grid should be the ranks of a host"
        )
        findings.append(_finding("layout", False, text))
    return findings


def axis_findings(measured: AxisMeasurement, name: str, hosts: Sequence[str]) -> list[Finding]:
    """One line for the axis, and one for each of its slow lines."""
    rates, latencies = measured.bytes_per_second, measured.latency_seconds
    sharing = measured.cost(name).ranks_per_link
    text = (
        f"{len(measured.lines)} {name}s of {len(measured.lines[0])} ranks, {_range(latencies, 1e3, 'ms')}, "
        f"{_range(rates, 1e-6, 'MB/s')} with all at once"
    )
    if any(measured.in_memory):
        inside = "" if all(measured.in_memory) else f" in {sum(measured.in_memory)} of them"
        text += f", through shared memory{inside}"
    if sharing >= 1.5:
        text += f"; one alone is {sharing:.1f} times as fast, so they share a link"
    slow = slow_lines(measured)
    findings = [_finding(name, not slow, text)]
    for line in slow:
        on = sorted({hosts[rank] for rank in measured.lines[line]}) if hosts else []
        more = " ..." if len(on) > _MAX_LINE_HOSTS_SHOWN else ""
        where = f" (hosts {', '.join(on[:_MAX_LINE_HOSTS_SHOWN])}{more})" if on else ""
        slow_text = (
            f"{name} of {ranks_text(measured.lines[line])}{where} has {1e-6 * rates[line]:.4g} MB/s, "
            f"the median {name} {1e-6 * _median_of_its_kind(measured, line):.4g}; look at its links and other load"
        )
        findings.append(_finding("slow link", False, slow_text))
    return findings


def slow_lines(measured: AxisMeasurement) -> list[int]:
    """Numbers of the lines below half of the median rate of their axis; of two, the upper one is the median.

    Lines whose ranks share memory are compared with one another, and so are lines of cables.
    """
    rates = measured.bytes_per_second
    return [line for line, rate in enumerate(rates) if rate < _SLOW * _median_of_its_kind(measured, line)]


def _median_of_its_kind(measured: AxisMeasurement, line: int) -> float:
    kinds = measured.in_memory
    return statistics.median_high(
        rate for rate, kind in zip(measured.bytes_per_second, kinds, strict=True) if kind == kinds[line]
    )


def _position(shape: GridShape, rank: int) -> str:
    return "(" + ", ".join(str(along) for along in shape.coordinates(rank)) + ")"


def _range(values: Sequence[float], factor: float, unit: str) -> str:
    scaled = [factor * value for value in (min(values), max(values))]
    low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in scaled)
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
