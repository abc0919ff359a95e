"""The command line: parses, calls, prints; no logic. Everything heavy is imported by the verb that needs it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    name="megabatch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train image classifiers with extremely large minibatches on many workers.",
    epilog="Example: `megabatch train demo --workers 4 --grid 2x2`",
)
data_app = typer.Typer(no_args_is_help=True, help="Get pictures to train on.")
app.add_typer(data_app, name="data")
bench_app = typer.Typer(no_args_is_help=True, help="Measure the machines at hand.")
app.add_typer(bench_app, name="bench")

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


@app.command(
    epilog="Examples: `megabatch train demo --workers 2` - "
    "`megabatch train demo --set train.epochs=1 --set data.source=generated` - "
    "`megabatch train demo --output runs/a --resume` - "
    "`torchrun --nproc-per-node 4 -m megabatch train demo`"
)
def train(
    recipe: Annotated[str, typer.Argument(help="A name from `megabatch recipes`, or a TOML file.")],
    data: Annotated[Path | None, typer.Option(help="Where the pictures are.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Local workers to start; under torchrun, srun or mpirun: how many must be there."),
    ] = None,
    grid: Annotated[str | None, typer.Option(help="Rows x columns of workers, for example 2x2.")] = None,
    output: Annotated[Path | None, typer.Option(help="Run folder; a new one under runs/ by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a recipe.

    Alone it starts its own local workers; under torchrun, srun or mpirun it joins them.
    """
    from megabatch.train.entry import TrainRequest, train_here

    overrides = tuple(set_ or ()) + (
        (f"data.path={json.dumps(str(data.absolute()), ensure_ascii=False)}",) if data else ()
    )
    request = TrainRequest(recipe, overrides, workers, grid, output, resume, debug)
    raise typer.Exit(train_here(request, os.environ))


@app.command(epilog="Example: `megabatch evaluate runs/demo-20260101-120000`")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data: Annotated[Path | None, typer.Option(help="Where the pictures are, if not where the run had them.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Exact top-1 and top-5 of a run's model, every validation picture counted once."""
    from megabatch.train.evaluate_run import evaluate_run

    result = evaluate_run(run, data)
    if not result.pop("speaks"):
        return
    if as_json:
        print(json.dumps(result))
    else:
        print(
            f"top-1 {result['top1']:.2%}  top-5 {result['top5']:.2%}  loss {result['loss']:.4f}  "
            f"({result['num_pictures']:,} pictures, {result['weights']})"
        )


@app.command(epilog="Example: `megabatch recipes demo`")
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one, with its sources and unknowns.")] = None,
    debug: Debug = False,
) -> None:
    """List the recipes, or show one."""
    from megabatch.recipes.show import print_recipe, print_recipes

    print_recipe(name) if name else print_recipes()


@app.command(epilog="Examples: `megabatch doctor` - `torchrun --nproc-per-node 4 -m megabatch doctor`")
def doctor(debug: Debug = False, as_json: Json = False) -> None:
    """What this machine and this allocation can do.

    Under torchrun, srun or mpirun also: which rank is where, latency and bandwidth of each axis, slow links.
    """
    from megabatch.train.doctor import examine, print_findings
    from megabatch.train.survey import examine_joined_world

    findings, speaks = examine_joined_world(os.environ)
    if not speaks:
        return
    findings = examine(os.environ) + findings
    print(json.dumps(findings)) if as_json else print_findings(findings)


@data_app.command("get", epilog="Example: `megabatch data get fashion-mnist`")
def data_get(
    name: Annotated[str, typer.Argument(help="fashion-mnist")],
    debug: Debug = False,
) -> None:
    """Fetch a known small set, check it, and say where it is."""
    from megabatch.data.known import default_cache, get_fashion_mnist
    from megabatch.errors import DataError, nearest

    if name != "fashion-mnist":
        raise DataError(f"unknown set '{name}'{nearest(name, ['fashion-mnist'])}; known: fashion-mnist")
    print(f"{name}: {get_fashion_mnist(default_cache(), progress=print)}")


@bench_app.callback()
def _bench() -> None:
    """Measure the machines at hand."""


@bench_app.command(
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
