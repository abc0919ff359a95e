"""Shows recipes to a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megabatch.config import Config
from megabatch.recipes import load_config, recipe_names, recipe_path

__all__ = ["print_recipe", "print_recipes"]


def print_recipes(console: Console | None = None) -> None:
    """One row per recipe: what it claims, and on which hardware."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("recipe", "total batch", "epochs", "time", "accuracy", "hardware"):
        table.add_column(column, overflow="fold")
    for name in recipe_names():
        config = load_config(name)
        promise = config.promise
        batch = str(config.train.batch_total)
        table.add_row(name, batch, f"{config.train.epochs:g}", promise.time, promise.accuracy, promise.hardware)
    (console or Console()).print(table)


def print_recipe(name: str, console: Console | None = None) -> None:
    """The promise of one recipe, what is unknown about it, and its settings as they are written."""
    console = console or Console(highlight=False, soft_wrap=True)
    config: Config = load_config(name)
    for label, text in config.promise.model_dump().items():
        if label == "unknown":
            for line in text:
                console.print(f"{'unknown':<10}{line}", markup=False)
        elif text:
            console.print(f"{label:<10}{text}", markup=False)
    console.print()
    console.print(recipe_path(name).read_text(encoding="utf-8"), markup=False)
