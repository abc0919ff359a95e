"""Shows recipes to a person."""

from __future__ import annotations

import re

from rich.console import Console
from rich.table import Table

from megabatch.config import Config
from megabatch.files import parse_toml, read_text
from megabatch.recipes import load_config, recipe_names, recipe_path
from megabatch.schedule.batch import count_steps, parse_stages, shard_range

_LABEL = 11


def print_recipes(console: Console | None = None) -> None:
    """One line per recipe, within 80 columns: what it does and claims; the whole texts are in `recipes NAME`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", no_wrap=True)
    for column in ("global batch", "epochs", "workers", "time", "top-1"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in recipe_names():
        config = load_config(name)
        reference, totals = config.reference, parse_stages(config.train.global_batch_size).global_batch_sizes
        batch = f"{totals[0]:,}" + (f" -> {totals[-1]:,}" if len(totals) > 1 else "")
        workers = f"{reference.workers:,}" if reference.workers else "-"
        time, top1 = _first(_TIME, reference.time), _first(_PERCENT, reference.accuracy)
        table.add_row(name, batch, f"{config.train.epochs:.4g}", workers, time, top1)
    console = console or Console()
    console.print(table)
    console.print("`megabatch recipes NAME` shows paper, hardware, sources, unknowns and settings.", markup=False)


_TIME = r"(?<![\d.,])\d[\d.]* ?(?:s|seconds?|min|minutes?|hours?|days?)\b"
_PERCENT = r"\d\d[\d.]* ?%"  # "within 1 % of ..." is no accuracy


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[0] if found else "-"


def print_recipe(name: str, console: Console | None = None) -> None:
    """The reference of one recipe, what is unknown about it, what follows from it, and its settings as written."""
    console = console or Console(highlight=False, soft_wrap=True)
    config: Config = load_config(name)
    for label, text in config.reference.model_dump(exclude={"unknown", "workers", "images"}).items():
        if text:
            console.print(f"{label:<{_LABEL}}{text}", markup=False)
    for line in config.reference.unknown:
        console.print(f"{'unknown':<{_LABEL}}{line}", markup=False)
    for line in derived_numbers(config):
        console.print(f"{'numbers':<{_LABEL}}{line}", markup=False)
    text = read_text(recipe_path(name))
    if base := parse_toml(text).get("base"):
        console.print(f"{'built on':<{_LABEL}}{base}: what is not set below is as there", markup=False)
    console.print()
    console.print(text, markup=False)


def derived_numbers(config: Config) -> list[str]:
    """What follows from a recipe at its published size: steps, ghost batches, how they fall to the workers."""
    images, workers = config.reference.images, config.reference.workers
    stages, ghost = parse_stages(config.train.global_batch_size), config.train.ghost_batch_size
    lines = []
    if images:
        steps = count_steps(stages, ghost, images, round(config.train.epochs * images))
        lines.append(f"{steps:,} steps in {config.train.epochs:g} epochs of {images:,} images")
    for start, total in zip(stages.from_epochs, stages.global_batch_sizes, strict=True):
        ghosts = total // ghost
        line = f"from epoch {start:g}: {total:,} images a step = {ghosts:,} ghost batches of {ghost}"
        if workers:
            counts = sorted({len(shard_range(ghosts, workers, worker)) for worker in range(workers)})
            line += f", {' or '.join(map(str, counts))} on each of {workers:,} workers"
        if images:
            line += f"; {total / images:.2%} of the set"
        lines.append(line)
    return lines
