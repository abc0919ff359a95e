"""Checks what can be checked before a script is handed over, and hands it over."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megabatch.comm.shape import parse_grid
from megabatch.errors import ConfigError, nearest
from megabatch.files import write_atomically
from megabatch.recipes import load_config

__all__ = ["check_kind", "check_recipe", "hand_over"]


def check_recipe(recipe: str, overrides: list[str], grid: str, world_size: int) -> None:
    """A recipe, an override or a grid that cannot work is told here, not hours later on the cluster.

    A file that only the cluster has cannot be checked: it must be given by an absolute path.
    """
    if not (recipe.endswith(".toml") and recipe.startswith("/") and not Path(recipe).exists()):
        load_config(recipe, overrides)
    if grid:
        parse_grid(grid).check_fits(world_size)


def check_kind(kind: str) -> Literal["pytorchjob", "trainjob"]:
    if kind == "pytorchjob":
        return "pytorchjob"
    if kind == "trainjob":
        return "trainjob"
    raise ConfigError(f"--kind '{kind}'; give pytorchjob or trainjob{nearest(kind, ['pytorchjob', 'trainjob'])}")


def hand_over(text: str, file: Path | None) -> None:
    """Print the text, or write the file and say so."""
    if file is None:
        print(text, end="")
        return
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--file '{file}' is in a folder that does not exist; make it first")
    write_atomically(file, text)
    print(f"written        {file}")
