"""`megabatch tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, Json, Recipe, Set, changes, examples, request_of

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch tune demo --trials 24 --jobs 2",
        "megabatch tune demo --budget 2h --epochs 4 --output runs/tune",
        "megabatch tune mikami2018 --scale cifar10 --data images --trials 16 --search optimizer.lr_factor=0.1:10:log",
        "megabatch train runs/tune/best.toml",
    )
)
def tune(
    ctx: typer.Context,
    recipe: Recipe,
    data: Annotated[Path | None, typer.Option(envvar="MEGABATCH_DATA", help="Where the images are.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, max=100_000, help="Stop after so many trials.")] = None,
    budget: Annotated[
        str,
        typer.Option(metavar="TIME", help="Stop when all trials together, on all hosts, have taken 90s, 45min, 2h."),
    ] = "",
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[=LOW:HIGH[:log]]",
            help="Search this setting in this range, and only those named; by default what the recipe leaves open.",
        ),
    ] = None,
    set_: Set = None,
    scale: Annotated[
        str | None, typer.Option(metavar="NAME", help="Fit the recipe to a small set first, as `train --scale` does.")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(metavar="E", help="Length of the longest runs; every schedule is stretched to it.")
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(min=1, help="Training images to judge by; a tenth, at most 10,000, by default.")
    ] = None,
    rungs: Annotated[
        int | None, typer.Option(min=1, max=6, help="Lengths of runs, each 3 times the one before; 1: no pruning.")
    ] = None,
    metric: Annotated[str, typer.Option(help="top1, top5 or val_loss, of the held-out images.")] = "top1",
    num_jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Trials at a time, one core each; as many as cores are free by default."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the search; hosts that share it share the trials. Under runs/.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the sampler.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the learning rate and what else a recipe leaves open, on images held out from the training set.

    The same command goes on where it was stopped, also after kill -9, and joins in from another host.
    """
    from megabatch.tune.conduct import TuneRequest, conduct

    request = request_of(TuneRequest, ctx, overrides=changes(set_, data))
    raise typer.Exit(conduct(request))
