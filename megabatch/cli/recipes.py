"""`megabatch recipes`."""

from __future__ import annotations

from typing import Annotated

import typer

from megabatch.cli.options import Debug, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch recipes demo",
    )
)
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one, with its sources and unknowns.")] = None,
    debug: Debug = False,
) -> None:
    """List the recipes, or show one."""
    from megabatch.recipes.show import print_recipe, print_recipes

    print_recipe(name) if name else print_recipes()
