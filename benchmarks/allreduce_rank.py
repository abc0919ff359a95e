"""What one rank of `allreduce_networks` does: iterations of all algorithms in turn, timed and checked.

An algorithm may carry a segment size, `torus@65536`. `backend` is Gloo's own all-reduce on the default group, called
as DDP calls it; everything else, `ring` included, is megabatch's own code. `auto` is what megabatch chooses for the
message after measuring and proving, with its defaults.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gate import StartGate
from megabatch.comm.allreduce import AllReducer
from megabatch.comm.calibration import Calibration
from megabatch.comm.grid import ProcessGrid
from megabatch.comm.measure import calibrate
from megabatch.comm.price import DEFAULT_SEGMENT_BYTES
from megabatch.comm.select import AutoReducer

__all__ = ["CellPlan", "RankReport", "contribution", "exact_sum", "parse_algorithm", "run_cells"]

_TIMEOUT_SECONDS = 120.0
_PERIOD = 8191  # prime, so that no chunk or segment boundary falls on it regularly
_FEW_WARM_UPS_BYTES = 50_000_000

Reduce = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class CellPlan:
    """One cell of the table: a message size, and how often each algorithm reduces it."""

    message_bytes: int
    iterations: int
    algorithms: tuple[str, ...]

    @property
    def warm_ups(self) -> int:
        """Two, as buffers are made in the first call and kept from the second on; huge messages get one."""
        return 1 if self.message_bytes >= _FEW_WARM_UPS_BYTES else 2


@dataclass
class RankReport:
    """What a rank saw. seconds[cell][algorithm][iteration]: from the agreed start to its own end.

    choices: message bytes -> what `auto` took and why. calibration: the links as measured before the first cell.
    """

    seconds: list[dict[str, list[float]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    choices: dict[int, str] = field(default_factory=dict)
    calibration: Calibration | None = None


def contribution(rank: int, numel: int) -> torch.Tensor:
    """What `rank` puts into a message: small whole numbers, whose sums float32 holds exactly."""
    return ((torch.arange(numel) % _PERIOD) * (rank + 3) % 23 + rank).to(torch.float32)


def exact_sum(world_size: int, numel: int) -> torch.Tensor:
    """The sum of all contributions, computed in whole numbers without any collective."""
    period = torch.arange(_PERIOD)
    total = sum((period * (rank + 3) % 23 + rank for rank in range(world_size)), torch.zeros_like(period))
    return total.to(torch.float32).repeat(-(-numel // _PERIOD))[:numel]


def parse_algorithm(text: str) -> tuple[str, int]:
    """("torus", 65536) from "torus@65536"; without a size, the library's default."""
    name, _, size = text.partition("@")
    return name, int(size) if size else DEFAULT_SEGMENT_BYTES


def run_cells(rank: int, grid_text: str, cells: tuple[CellPlan, ...], gate_file: Path) -> RankReport:
    """Measure the links, then every cell."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_SECONDS))
    grid = ProcessGrid.build(grid_text, timeout_seconds=_TIMEOUT_SECONDS)
    gate = StartGate(gate_file, rank, grid.world_size, _TIMEOUT_SECONDS)
    report = RankReport(calibration=calibrate(grid))
    auto = None
    if any("auto" in cell.algorithms for cell in cells):
        auto = AutoReducer(grid, calibration=report.calibration)
    for cell in cells:
        reduces = {text: _reduce_function(grid, text, auto) for text in cell.algorithms}
        report.seconds.append(_run_cell(grid, cell, reduces, gate, report.wrong))
        if auto is not None:
            report.choices[cell.message_bytes] = auto.choice_for(cell.message_bytes).reason
    gate.wait()
    grid.close()
    dist.destroy_process_group()
    return report


def _run_cell(
    grid: ProcessGrid, cell: CellPlan, reduces: dict[str, Reduce], gate: StartGate, wrong: list[str]
) -> dict[str, list[float]]:
    numel = cell.message_bytes // 4
    own = contribution(grid.rank, min(numel, 64 * _PERIOD))
    message = torch.empty(numel)
    seconds: dict[str, list[float]] = {text: [] for text in reduces}
    order = list(reduces)
    shuffle = random.Random(cell.message_bytes)
    for iteration in range(-cell.warm_ups, cell.iterations):
        for text in order:
            _refill(message, own)
            start = gate.wait()
            reduces[text](message)
            if iteration >= 0:
                seconds[text].append(time.perf_counter() - start)
            elif iteration == -1 and not torch.equal(message, exact_sum(grid.world_size, numel)):
                wrong.append(f"{text}, {cell.message_bytes} bytes, rank {grid.rank}")
        shuffle.shuffle(order)  # nobody always follows the same neighbour; alike on all ranks
    return seconds


def _reduce_function(grid: ProcessGrid, text: str, auto: AutoReducer | None) -> Reduce:
    name, segment_bytes = parse_algorithm(text)
    if name == "backend":
        return dist.all_reduce
    if name == "auto":
        assert auto is not None
        return auto.run
    return AllReducer(grid, name, segment_bytes=segment_bytes).run


def _refill(message: torch.Tensor, own: torch.Tensor) -> None:
    """Write the contribution, whose period divides `own` unless the message is as short as that."""
    for block in message.split(len(own)):
        block.copy_(own[: len(block)])
