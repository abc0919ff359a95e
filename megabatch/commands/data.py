"""`megabatch data ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from megabatch.commands.options import Debug

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Get pictures to train on.")


@app.callback()
def _data() -> None:
    """Get pictures to train on."""


@app.command("get", epilog="Example: `megabatch data get fashion-mnist`")
def data_get(
    name: Annotated[str, typer.Argument(help="fashion-mnist")],
    debug: Debug = False,
) -> None:
    """Fetch a known small set, check it, and say where it is."""
    from megabatch.data.known import default_cache, get_fashion_mnist
    from megabatch.errors import DataError, nearest

    if name != "fashion-mnist":
        raise DataError(f"unknown set '{name}'{nearest(name, ['fashion-mnist'])}; known: fashion-mnist")
    print(f"{name}: {get_fashion_mnist(default_cache(), progress=print)}")
