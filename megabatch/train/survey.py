"""Measures the world of workers itself, without training: `megabatch bench allreduce`, and `doctor` under a launcher.

Like `train`, a bench started alone starts local workers, and joins those of a launcher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.comm.phases import ALGORITHMS
from megabatch.errors import ConfigError, LaunchError, nearest
from megabatch.train.launch import start_workers
from megabatch.train.worker import run_as_worker
from megabatch.train.world import World, choose_device, join, read_world

__all__ = ["BenchRequest", "bench_allreduce", "examine_joined_world", "parse_size"]

_UNITS = {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}
_TIMEOUT_SECONDS = 120.0


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

    def arguments(self) -> list[str]:
        """The command line of a worker that does the same."""
        words = ["bench", "allreduce", "--sizes", self.sizes, "--iterations", str(self.iterations)]
        words += ["--algorithms", self.algorithms] if self.algorithms else []
        words += ["--grid", self.grid] if self.grid else []
        words += ["--output", str(self.output.absolute())] if self.output else []
        return words + ["--json"] * self.as_json


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
        return start_workers(request.workers, request.arguments(), max_restarts=0)
    return run_as_worker(lambda: _bench_in(world, request, sizes, algorithms), world, environ)


def _bench_in(world: World, request: BenchRequest, sizes: list[int], algorithms: list[str]) -> int:
    import torch

    from megabatch.comm.bench import print_rows, rows_as_data, run_bench, write_calibration
    from megabatch.comm.grid import ProcessGrid

    device, backend = choose_device("auto", world)
    torch.set_num_threads(1)
    with join(world, backend, _TIMEOUT_SECONDS):
        grid = ProcessGrid.build(request.grid, timeout_seconds=_TIMEOUT_SECONDS)
        rows = run_bench(grid, sizes, algorithms, request.iterations, device=device)
        if request.output is not None:
            write_calibration(grid, rows, request.output)
        if world.is_main and request.as_json:
            print(json.dumps({"grid": grid.shape.text, "workers": world.size, "rows": rows_as_data(rows)}))
        elif world.is_main:
            print_rows(rows, title=f"all-reduce over {world.size} workers, grid {grid.shape.text} ({grid.reason})")
    return 0


def examine_joined_world(environ: Mapping[str, str]) -> tuple[list[dict[str, Any]], bool]:
    """Findings about the world a launcher has made, and whether this process is the one to print them."""
    world = read_world(environ, alone=True)
    if world is None or world.size == 1:
        return [], True
    from megabatch.comm.grid import ProcessGrid
    from megabatch.comm.preflight import examine_world

    _, backend = choose_device("auto", world)
    with join(world, backend, _TIMEOUT_SECONDS):
        return examine_world(ProcessGrid.build(timeout_seconds=_TIMEOUT_SECONDS)), world.is_main
