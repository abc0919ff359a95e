"""`megabatch train`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, Set, changes, examples, request_of

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch train photos --data FOLDER",
        "megabatch train demo --workers 2",
        "megabatch train demo --set train.epochs=1 --set data.source=generated",
        "megabatch train --resume runs/a",
        "megabatch train --resume runs/a --epochs 40",
        "megabatch train demo --output runs/a --resume",
        "megabatch train mikami2018 --scale fashion-mnist --epochs 30 --set optimizer.lr_factor=0.5",
        "megabatch train demo --plan plan.json",
        "torchrun --nproc-per-node 4 -m megabatch train demo",
    )
)
def train(
    ctx: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="A name from `megabatch recipes`, a TOML file, or with --resume the folder of a run.")
    ],
    data: Annotated[Path | None, typer.Option(help="Where the images are.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Local workers to start; under torchrun, srun or mpirun: how many must be there."),
    ] = None,
    grid: Annotated[str | None, typer.Option(help="Rows x columns of workers, for example 2x2.")] = None,
    output: Annotated[Path | None, typer.Option(help="Run folder; a new one under runs/ by default.")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with a run, as it was: its folder stands for the recipe. Or with the one in --output.",
        ),
    ] = False,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Fit the recipe to a small set: cifar10, fashion-mnist, or a TOML file with a profile."
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            metavar="E",
            help="Shorten or stretch the recipe, every schedule and stage alike; with --resume the run's.",
        ),
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
    check_memory: Annotated[
        bool,
        typer.Option("--check-memory", help="Say how much memory a worker needs and whether it fits; train nothing."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a recipe.

    Alone it starts its own local workers; under torchrun, srun or mpirun it joins them.
    """
    from megabatch.cli.words import TrainWords, make_request
    from megabatch.train.entry import train_here

    words = request_of(TrainWords, ctx, overrides=changes(set_, data))
    request, num_local = make_request(words, os.environ, partial(print, flush=True))
    if check_memory:
        from megabatch.bench.memory import count_memory, device_memory

        ghost, device = request.config.train.ghost_batch_size, device_memory()
        memory = count_memory(request.config, num_local or 1)
        print("\n".join(memory.lines(ghost, device)))
        raise typer.Exit(1 if device and not memory.fits(device) else 0)
    raise typer.Exit(train_here(request, num_local, os.environ))
