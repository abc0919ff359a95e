"""Options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Debug", "Json"]

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
