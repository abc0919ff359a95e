"""`megabatch bench ...`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megabatch.commands.options import Debug, Json

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure the machines at hand.")


@app.callback()
def _bench() -> None:
    """Measure the machines at hand."""


@app.command(
    "allreduce",
    epilog="Examples: `megabatch bench allreduce --workers 4 --grid 2x2` - "
    "`torchrun --nnodes 4 --nproc-per-node 4 ... -m megabatch bench allreduce --output calibration.json`",
)
def bench_allreduce(
    sizes: Annotated[str, typer.Option(help="Message sizes, separated by commas.")] = "1KB,100KB,1MB,10MB",
    algorithms: Annotated[str, typer.Option(help="Names separated by commas; all by default.")] = "",
    iterations: Annotated[int, typer.Option(min=1, help="Rounds that count, per size.")] = 20,
    workers: Annotated[int | None, typer.Option(min=2, help="Local workers to start.")] = None,
    grid: Annotated[str | None, typer.Option(help="Rows x columns, for example 2x2.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write a calibration file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time all-reduce algorithms by message size, p50 and p95 over all ranks, against the backend's own."""
    from megabatch.train.survey import BenchRequest
    from megabatch.train.survey import bench_allreduce as run

    raise typer.Exit(run(BenchRequest(sizes, algorithms, iterations, workers, grid, output, as_json), os.environ))
