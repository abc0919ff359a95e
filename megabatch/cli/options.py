"""Options that several verbs share."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Recipe = Annotated[str, typer.Argument(help="A name from `megabatch recipes`, or a TOML file.")]
FinishedRun = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
DataOfRun = Annotated[Path | None, typer.Option(help="Where the images are, if not where the run had them.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe.")]

Request = TypeVar("Request")


def changes(set_: list[str] | None, data: Path | None) -> tuple[str, ...]:
    """What --set and --data change in a recipe, as overrides."""
    of_data = [f"data.path={json.dumps(str(data.absolute()), ensure_ascii=False)}"] if data else []
    return (*(set_ or ()), *of_data)


def request_of(kind: type[Request], ctx: typer.Context, **more: Any) -> Request:
    """A request (a dataclass) made of `more` and of what was typed: the verb's parameters have the fields' names."""
    make: Any = kind
    values = {}
    for field in fields(make):
        if field.name in ctx.params:
            value = ctx.params[field.name]
            values[field.name] = tuple(value or ()) if field.default == () else value
    request: Request = make(**{**values, **more})
    return request


def examples(*commands: str) -> str:
    """The end of a verb's help: each example on lines of its own."""
    return "Examples:\n\n" + "\n\n".join(f"- `{command}`" for command in commands)
