"""`megabatch train`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, Recipe, Set, changes, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch train demo --workers 2",
        "megabatch train demo --set train.epochs=1 --set data.source=generated",
        "megabatch train demo --output runs/a --resume",
        "megabatch train mikami2018 --scale fashion-mnist --epochs 30 --set optimizer.lr_factor=0.5",
        "megabatch train demo --plan plan.json",
        "torchrun --nproc-per-node 4 -m megabatch train demo",
    )
)
def train(
    recipe: Recipe,
    data: Annotated[Path | None, typer.Option(help="Where the images are.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Local workers to start; under torchrun, srun or mpirun: how many must be there."),
    ] = None,
    grid: Annotated[str | None, typer.Option(help="Rows x columns of workers, for example 2x2.")] = None,
    output: Annotated[Path | None, typer.Option(help="Run folder; a new one under runs/ by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")] = False,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Fit the recipe to a small set: cifar10, fashion-mnist, or a TOML file with a profile."
        ),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(metavar="E", help="Shorten or stretch the recipe, every schedule and stage alike.")
    ] = None,
    set_: Set = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Follow a plan of `megabatch plan --output`: its workers, grid, settings, scale and epochs; "
            "what is typed here wins."
        ),
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:PORT]",
            help="Workers may come and go: local ones alone, or all that meet at the lighthouse HOST:PORT.",
        ),
    ] = None,
    min_workers: Annotated[int, typer.Option(min=1, help="Elastic: with fewer the run waits, then stops.")] = 1,
    max_workers: Annotated[int, typer.Option(min=0, help="Elastic: further workers wait for a free place.")] = 0,
    debug: Debug = False,
) -> None:
    """Train a recipe.

    Alone it starts its own local workers; under torchrun, srun or mpirun it joins them.
    """
    from megabatch.recipes import load_config
    from megabatch.recipes.scale import scaling_lines
    from megabatch.train.elastic_entry import Elastic
    from megabatch.train.entry import TrainRequest, train_here

    overrides, plan_text = changes(set_, data), ""
    if plan is not None:
        from megabatch.plan.plan_file import follow

        planned = follow(plan, recipe, grid, workers, os.environ, scale=scale, epochs=epochs)
        overrides, plan_text = planned.overrides + overrides, planned.text
        grid, workers, scale, epochs = planned.grid, planned.workers, planned.scale, planned.epochs
    config = load_config(recipe, list(overrides), scale=scale, epochs=epochs)
    lines = scaling_lines(load_config(recipe, epochs=epochs), config) if scale is not None else []
    name = Path(recipe).stem
    request = TrainRequest(
        config, output, grid, resume=resume, debug=debug, plan=plan_text, name=name, lines=tuple(lines)
    )
    if elastic is not None:
        lighthouse = "" if elastic == "local" else elastic
        request = replace(request, elastic=Elastic(lighthouse, min_workers, max_workers))
    raise typer.Exit(train_here(request, workers, os.environ))
