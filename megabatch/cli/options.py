"""Options that several verbs share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Recipe = Annotated[str, typer.Argument(help="A name from `megabatch recipes`, or a TOML file.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe.")]


def changes(set_: list[str] | None, data: Path | None) -> tuple[str, ...]:
    """What --set and --data change in a recipe, as overrides."""
    of_data = [f"data.path={json.dumps(str(data.absolute()), ensure_ascii=False)}"] if data else []
    return (*(set_ or ()), *of_data)


def examples(*commands: str) -> str:
    """The end of a verb's help: each example on lines of its own."""
    return "Examples:\n\n" + "\n\n".join(f"- `{command}`" for command in commands)
