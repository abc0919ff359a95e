"""`megabatch train`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, Set, changes, examples
from megabatch.errors import CheckpointError, LaunchError

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch train photos --data FOLDER",
        "megabatch train demo --workers 2",
        "megabatch train demo --set train.epochs=1 --set data.source=generated",
        "megabatch train --resume runs/a",
        "megabatch train demo --output runs/a --resume",
        "megabatch train mikami2018 --scale fashion-mnist --epochs 30 --set optimizer.lr_factor=0.5",
        "megabatch train demo --plan plan.json",
        "torchrun --nproc-per-node 4 -m megabatch train demo",
    )
)
def train(
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
    check_memory: Annotated[
        bool,
        typer.Option("--check-memory", help="Say how much memory a worker needs and whether it fits; train nothing."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a recipe.

    Alone it starts its own local workers; under torchrun, srun or mpirun it joins them.
    """
    from megabatch.data.own import batch_note, fit_to_set
    from megabatch.recipes import load_config
    from megabatch.recipes.scale import scaling_lines
    from megabatch.train.entry import train_here
    from megabatch.train.request import Elastic, TrainRequest
    from megabatch.train.run_dir import recorded_run
    from megabatch.workers.world import read_world

    if elastic is None and (min_workers > 1 or max_workers):
        raise LaunchError("--min-workers and --max-workers bound the workers of an elastic run; add --elastic")
    overrides, plan_text = changes(set_, data), ""
    name = Path(recipe).stem
    if resume and output is None and (recorded := recorded_run(Path(recipe))):
        recipe, output = recorded.recipe, recorded.folder
        if workers is None and grid is None and read_world(os.environ) is None:
            workers, grid = recorded.workers, recorded.grid
    elif resume and output is None and Path(recipe).is_dir():
        raise CheckpointError(f"'{recipe}' is not a run folder (it has no config.toml); give the folder of a run")
    if plan is not None:
        from megabatch.plan.plan_file import follow

        planned = follow(plan, recipe, grid, workers, os.environ, scale=scale, epochs=epochs)
        overrides, plan_text = planned.overrides + overrides, planned.text
        grid, workers, scale, epochs = planned.grid, planned.workers, planned.scale, planned.epochs
    config = load_config(recipe, list(overrides), scale=scale, epochs=epochs)
    if data is not None and data.exists():  # the first word: looking at the images may take seconds
        world = read_world(os.environ, alone=workers is not None)
        if world is None or world.is_main:
            print(f"recipe         {recipe}, looking at the images in {data}", flush=True)
    published = load_config(recipe, scale=scale, epochs=epochs)
    lines = scaling_lines(load_config(recipe, epochs=epochs), config) if scale is not None else []
    lines += batch_note(published, config)
    if data is not None:
        fitted = fit_to_set(config, data.absolute(), overrides)
        overrides, lines = overrides + fitted.overrides, [*lines, *fitted.lines]
        config = load_config(recipe, list(overrides), scale=scale, epochs=epochs)
    if check_memory:
        from megabatch.bench.memory import count_memory, device_memory

        ghost, device = config.train.ghost_batch_size, device_memory()
        memory = count_memory(config, workers or 1)
        print("\n".join(memory.lines(ghost, device)))
        raise typer.Exit(1 if memory.verdict(ghost, device).startswith("DOES") else 0)
    request = TrainRequest(
        config, output, grid, resume=resume, debug=debug, plan=plan_text, name=name, lines=tuple(lines)
    )
    if elastic is not None:
        lighthouse = "" if elastic == "local" else elastic
        request = replace(request, elastic=Elastic(lighthouse, min_workers=min_workers, max_workers=max_workers))
    raise typer.Exit(train_here(request, workers, os.environ))
