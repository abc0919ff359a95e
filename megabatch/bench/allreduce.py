"""Times all-reduce algorithms on a grid, size by size: what `megabatch bench allreduce` runs.

Algorithms take turns in every round, so that other load meets all of them alike; the first rounds are dropped. A time
is that of the slowest rank; p50 and p95 are over rounds, and n is stated. Bandwidths are those of nccl-tests:
algorithm bandwidth is message / time, bus bandwidth is 2(n-1)/n times that, comparable with what a link can do.
The first result of every cell is checked against the sum it must be.

Like `train`, a bench started alone starts local workers, and joins those of a launcher.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megabatch.comm.calibration import Calibration, MeasuredPoint, write_calibration_file
from megabatch.comm.grid import ProcessGrid, Reducer
from megabatch.comm.measure import calibrate, gather, on_main_rank_of, probe_device, race
from megabatch.comm.phases import ALGORITHMS, phases
from megabatch.comm.select import make_reducer
from megabatch.errors import CommunicationError, ConfigError, LaunchError, nearest
from megabatch.text import bytes_text
from megabatch.workers.local import run_as_worker, start_workers
from megabatch.workers.meeting import join
from megabatch.workers.world import World, choose_device, read_world

_WARM_UP_ROUNDS = 2
_TIMEOUT_SECONDS = 120.0
_UNITS = {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}


@dataclass(frozen=True)
class BenchRequest:
    """What the user typed after `megabatch bench allreduce`."""

    sizes: str = "1KB,100KB,1MB,10MB"
    algorithms: str = ""  # empty: all
    iterations: int = 20
    workers: int | None = None
    grid: str | None = None
    output: Path | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: an algorithm at a size, over `iterations` rounds that counted.

    against_backend: how many times as fast as the backend's own all-reduce in the same rounds, by medians; None if
    that did not take part.
    """

    algorithm: str
    message_bytes: int
    iterations: int
    p50_seconds: float
    p95_seconds: float
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float
    against_backend: float | None = None


def parse_size(text: str) -> int:
    """Read `100KB`, `1MB` or `4096` as bytes; a KB is 1024 of them."""
    word = text.strip().upper()
    unit = next((unit for unit in ("KB", "MB", "GB", "B") if word.endswith(unit)), "")
    try:
        return int(float(word.removesuffix(unit)) * _UNITS.get(unit, 1))
    except ValueError:
        raise ConfigError(f"size '{text}' cannot be read; write a number with B, KB, MB or GB, such as 100KB") from None


def bench_allreduce(request: BenchRequest, environ: Mapping[str, str]) -> int:
    """Measure all-reduce in the world this process finds itself in, or in local workers it starts."""
    sizes = [parse_size(word) for word in request.sizes.split(",")]
    algorithms = [word.strip() for word in request.algorithms.split(",") if word.strip()] or [*ALGORITHMS, "auto"]
    for name in algorithms:
        if name not in (*ALGORITHMS, "auto"):
            hint = nearest(name, [*ALGORITHMS, "auto"])
            raise ConfigError(f"all-reduce algorithm '{name}' is unknown; known: {', '.join(ALGORITHMS)}, auto{hint}")
    world = read_world(environ, alone=request.workers is not None)
    if world is None:
        if request.workers is None:
            raise LaunchError("one worker has nothing to reduce; add --workers N, or start it with torchrun or srun")
        return start_workers(request.workers, _start_work, replace(request, workers=None))
    return run_as_worker(lambda: _bench_in(world, request, sizes, algorithms), world, environ)


def run_bench(
    grid: ProcessGrid,
    sizes: Sequence[int],
    algorithms: Sequence[str] = tuple(ALGORITHMS),
    iterations: int = 20,
    *,
    device: torch.device | None = None,
) -> list[Row]:
    """Rows for every size and algorithm ("auto" among them), equal on all ranks, which must all call it.

    Raises:
        ConfigError: an unknown algorithm, a size under 4 bytes, or no iterations.
        CommunicationError: a rank died, did not answer in time, or a result is not the sum.
    """
    _check(sizes, algorithms, iterations)
    for algorithm in set(algorithms) - {"auto"}:
        phases(algorithm, grid.shape)  # refuses unknown names before anything runs
    if grid.world_size == 1:
        raise ConfigError("one worker has nothing to reduce; start several, for instance with torchrun")
    device = device or probe_device(grid)
    rows: list[Row] = []
    reducers = {algorithm: make_reducer(grid, algorithm) for algorithm in dict.fromkeys(algorithms)}
    for size in dict.fromkeys(sizes):
        buffer = torch.zeros(size // 4, device=device)
        for algorithm, reducer in reducers.items():
            _check_sum(grid, reducer, buffer, algorithm)
        buffer.zero_()  # sums of zeros stay zeros, however often they are added up
        runs = {algorithm: partial(reducer.run, buffer) for algorithm, reducer in reducers.items()}
        race(grid, runs, _WARM_UP_ROUNDS)
        rows += _rows(race(grid, runs, iterations), buffer.numel() * 4, grid.world_size)
    for reducer in reducers.values():
        reducer.close()
    return rows


def print_rows(rows: Sequence[Row], console: Console | None = None, *, title: str = "") -> None:
    """A table for people; times in milliseconds, bandwidths in 10^6 bytes per second."""
    table = Table(title=title or None, title_justify="left")
    table.add_column("size")
    table.add_column("algorithm", no_wrap=True)
    for heading in ("n", "p50 ms", "p95 ms", "alg MB/s", "bus MB/s", "x backend"):
        table.add_column(heading, justify="right")
    for index, row in enumerate(rows):
        is_last = index + 1 == len(rows) or rows[index + 1].message_bytes != row.message_bytes
        table.add_row(
            bytes_text(row.message_bytes),
            row.algorithm,
            str(row.iterations),
            f"{1e3 * row.p50_seconds:.3f}",
            f"{1e3 * row.p95_seconds:.3f}",
            f"{1e-6 * row.algorithm_bytes_per_second:.1f}",
            f"{1e-6 * row.bus_bytes_per_second:.1f}",
            "" if row.against_backend is None else f"{row.against_backend:.2f}",
            end_section=is_last,
        )
    (console or Console(highlight=False)).print(table)


def write_calibration(grid: ProcessGrid, rows: Sequence[Row], path: str | Path) -> Calibration:
    """Measure the axes, join the rows; the main rank writes the file. All ranks must call it and get the same."""
    measured = calibrate(grid)
    points = tuple(
        MeasuredPoint(row.algorithm, row.message_bytes, row.p50_seconds) for row in rows if row.algorithm != "auto"
    )
    if not any(point.algorithm == "backend" for point in points):
        points += measured.points
    calibration = replace(measured, points=points)
    on_main_rank_of(grid, lambda: write_calibration_file(path, calibration))
    return calibration


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def _start_work(request: BenchRequest) -> int:
    """What a local worker does."""
    return bench_allreduce(request, os.environ)


def _bench_in(world: World, request: BenchRequest, sizes: list[int], algorithms: list[str]) -> int:
    device, backend = choose_device("auto", world)
    if backend != "gloo" and not request.algorithms:
        algorithms = [name for name in algorithms if name != "two_way_torus"]  # refused there
    torch.set_num_threads(1)
    with (
        join(world, backend, _TIMEOUT_SECONDS, device),
        ProcessGrid.build(request.grid, timeout_seconds=_TIMEOUT_SECONDS) as grid,
    ):
        rows = run_bench(grid, sizes, algorithms, request.iterations, device=device)
        if request.output is not None:
            write_calibration(grid, rows, request.output)
        if world.is_main and request.as_json:
            data = [asdict(row) for row in rows]
            print(json.dumps({"grid": grid.shape.text, "workers": world.size, "rows": data}))
        elif world.is_main:
            print_rows(rows, title=f"all-reduce over {world.size} workers, grid {grid.shape.text} ({grid.reason})")
    return 0


def _rows(seconds: dict[str, list[float]], message_bytes: int, world_size: int) -> list[Row]:
    backend = quantile(seconds["backend"], 0.5) if "backend" in seconds else None
    rows = []
    for algorithm, times in seconds.items():
        p50, p95 = quantile(times, 0.5), quantile(times, 0.95)
        rate = message_bytes / p50
        bus_rate = rate * 2 * (world_size - 1) / world_size
        against_backend = None if backend is None else backend / p50
        rows.append(Row(algorithm, message_bytes, len(times), p50, p95, rate, bus_rate, against_backend))
    return rows


def _check(sizes: Sequence[int], algorithms: Sequence[str], iterations: int) -> None:
    if not sizes or min(sizes) < 4:
        raise ConfigError(f"message sizes {list(sizes)}; give at least one, each of 4 bytes or more")
    if not algorithms:
        raise ConfigError("no algorithm to time; give at least one")
    if iterations < 1:
        raise ConfigError(f"{iterations} iterations; give at least 1, 20 is the default")


def _check_sum(grid: ProcessGrid, reducer: Reducer, buffer: torch.Tensor, algorithm: str) -> None:
    """Small whole numbers that differ by rank and position: their sum is exact in any order."""
    places = torch.arange(buffer.numel(), device=buffer.device) % 7
    buffer.copy_(places + grid.rank)
    reducer.run(buffer)
    wanted = grid.world_size * places + sum(range(grid.world_size))
    wrong = int((buffer != wanted).sum())
    if any(count for (count,) in gather(grid, [float(wrong)])):
        raise CommunicationError(
            f"{algorithm} gave a wrong sum for {bytes_text(4 * buffer.numel())} ({wrong} elements on rank "
            f"{grid.rank}); do not train with it, and report the case"
        )
