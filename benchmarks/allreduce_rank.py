"""What one rank of `allreduce_networks` does: iterations of all algorithms in turn, timed and checked.

An algorithm may carry a segment size, `torus@65536`. `backend` is Gloo's own all-reduce on the default group, called
as DDP calls it; everything else, `ring` included, is megabatch's own code. `auto` is what `megabatch.comm.select`
chooses for the message.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gate import StartGate
from megabatch.comm.allreduce import DEFAULT_SEGMENT_BYTES, AllReducer
from megabatch.comm.grid import ProcessGrid

__all__ = ["CellPlan", "RankReport", "contribution", "exact_sum", "parse_algorithm", "run_cells"]

_TIMEOUT_SECONDS = 120.0
_WARM_UPS = 2
_PERIOD = 8191  # prime, so that no chunk or segment boundary falls on it regularly
_PING_ROUNDS = 30
_LOAD_BYTES = 2_000_000
_LOAD_ROUNDS = 3


@dataclass(frozen=True)
class CellPlan:
    """One cell of the table: a message size, and how often each algorithm reduces it."""

    message_bytes: int
    iterations: int
    algorithms: tuple[str, ...]


@dataclass
class RankReport:
    """What a rank saw: end times after the agreed start, wrong results, what `auto` chose, its links.

    seconds[cell][algorithm] has one entry per iteration. links: axis name -> (one-way seconds of an empty message,
    bytes per second of a rank while all ranks send along the axis); measured by every rank at the same time.
    """

    seconds: list[dict[str, list[float]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)
    links: dict[str, tuple[float, float]] = field(default_factory=dict)


def contribution(rank: int, numel: int) -> torch.Tensor:
    """What `rank` puts into a message: small whole numbers, whose sums float32 holds exactly."""
    return ((torch.arange(numel) % _PERIOD) * (rank + 3) % 23 + rank).to(torch.float32)


def exact_sum(num_ranks: int, numel: int) -> torch.Tensor:
    """The sum of all contributions, computed in whole numbers without any collective."""
    period = torch.arange(min(numel, _PERIOD))
    total = sum((period * (rank + 3) % 23 + rank for rank in range(num_ranks)), torch.zeros_like(period))
    return total.repeat(-(-numel // len(total)))[:numel].to(torch.float32)


def parse_algorithm(text: str) -> tuple[str, int]:
    """("torus", 65536) from "torus@65536"; without a size, the library's default."""
    name, _, size = text.partition("@")
    return name, int(size) if size else DEFAULT_SEGMENT_BYTES


def run_cells(rank: int, grid_text: str, cells: tuple[CellPlan, ...], gate_file: Path) -> RankReport:
    """Measure the links, then every cell."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_SECONDS))
    grid = ProcessGrid.build(grid_text, timeout_seconds=_TIMEOUT_SECONDS)
    gate = StartGate(gate_file, rank, grid.world_size, _TIMEOUT_SECONDS)
    report = RankReport()
    for axis, name in enumerate(grid.shape.names):
        report.links[name] = _measure_axis(grid, axis, gate)
    for cell in cells:
        report.seconds.append(_run_cell(grid, cell, gate, report))
    gate.wait()
    grid.close()
    dist.destroy_process_group()
    return report


def _run_cell(grid: ProcessGrid, cell: CellPlan, gate: StartGate, report: RankReport) -> dict[str, list[float]]:
    numel = cell.message_bytes // 4
    own = contribution(grid.rank, min(numel, 64 * _PERIOD))
    message = torch.empty(numel)
    reduces: dict[str, Callable[[torch.Tensor], object]] = {}
    for text in cell.algorithms:
        reduce = _reduce_function(grid, text, cell.message_bytes, report)
        if reduce is not None:
            reduces[text] = reduce
    seconds: dict[str, list[float]] = {text: [] for text in reduces}
    order = list(reduces)
    for iteration in range(-_WARM_UPS, cell.iterations):
        for text in order:
            _refill(message, own)
            start = gate.wait()
            reduces[text](message)
            if iteration >= 0:
                seconds[text].append(time.perf_counter() - start)
            if iteration == -1 and not torch.equal(message, exact_sum(grid.world_size, numel)):
                report.wrong.append(f"{text}, {cell.message_bytes} bytes")
        order = order[1:] + order[:1]  # nobody always follows the same neighbour
    return seconds


def _reduce_function(
    grid: ProcessGrid, text: str, message_bytes: int, report: RankReport
) -> Callable[[torch.Tensor], object] | None:
    name, segment_bytes = parse_algorithm(text)
    if name == "backend":
        return dist.all_reduce
    if name == "auto":
        return _auto(grid, message_bytes, report)
    return AllReducer(grid, name, segment_bytes=segment_bytes).run


def _auto(grid: ProcessGrid, message_bytes: int, report: RankReport) -> Callable[[torch.Tensor], object] | None:
    """The chooser's all-reduce, or None and a reason where this installation has none."""
    try:
        select: Any = importlib.import_module("megabatch.comm.select")
        reducer = select.auto_reducer(grid)
    except (ImportError, AttributeError) as error:
        report.skipped["auto"] = str(error)
        return None
    return reducer.run  # type: ignore[no-any-return]


def _refill(message: torch.Tensor, own: torch.Tensor) -> None:
    for block in message.split(len(own)):
        block.copy_(own[: len(block)])


def _measure_axis(grid: ProcessGrid, axis: int, gate: StartGate) -> tuple[float, float]:
    """One-way seconds of an empty message between neighbours, and bytes/s of each rank while all send."""
    if grid.axis_size(axis) == 1:
        return 0.0, float("inf")
    group, position, size = grid.group(axis), grid.axis_position(axis), grid.axis_size(axis)
    left, right = grid.axis_ranks(axis)[position - 1], grid.axis_ranks(axis)[(position + 1) % size]
    token = torch.zeros(1)
    rounds = []
    gate.wait()
    for _ in range(_PING_ROUNDS):  # a token once round the ring: `size` hops one after another
        start = time.perf_counter()
        receive = dist.irecv(token, left, group=group)
        if position == 0:
            dist.send(token, right, group=group)
            receive.wait()
        else:
            receive.wait()
            dist.send(token, right, group=group)
        rounds.append((time.perf_counter() - start) / size)
    load, buffer = torch.zeros(_LOAD_BYTES // 4), torch.empty(_LOAD_BYTES // 4)
    speeds = []
    for _ in range(_LOAD_ROUNDS):
        start = gate.wait()
        works = [dist.irecv(buffer, left, group=group), dist.isend(load, right, group=group)]
        for work in works:
            assert work is not None
            work.wait()
        speeds.append(_LOAD_BYTES / (time.perf_counter() - start))
    return statistics.median(rounds), statistics.median(speeds)
