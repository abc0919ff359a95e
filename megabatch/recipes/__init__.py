"""Recipes: TOML files that say everything about a run except the machines it runs on.

A recipe opens with `[reference]`: the paper, the hardware, the time and the accuracy it claims, and what is unknown.
`base = "other"` starts from another recipe and changes what differs. `--set section.key=value` changes one setting,
`--scale cifar10` fits all of it to a small set, `--epochs 30` shortens it; see `megabatch.recipes.scale`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megabatch.config import Config
from megabatch.errors import ConfigError, nearest
from megabatch.files import parse_toml, read_text
from megabatch.recipes.scale import at_scale, over_epochs, read_profile
from megabatch.recipes.validate import apply_override, validate

__all__ = ["config_from_toml", "load_config", "recipe_names", "recipe_path"]

RECIPES = Path(__file__).parent


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    names = (path.stem for path in RECIPES.glob("*.toml"))
    return sorted(names, key=lambda name: [(part.zfill(9) if part.isdecimal() else part) for part in name.split("_")])


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe, or `name` itself when it is a path to a TOML file."""
    if name.endswith(".toml"):
        if not Path(name).is_file():
            problem = "is not an ordinary file" if Path(name).exists() else "does not exist"
            raise ConfigError(f"recipe file '{name}' {problem}; give a file, or a name from `megabatch recipes`")
        return Path(name)
    if name not in recipe_names():
        hint = nearest(name, recipe_names()) or f"; known: {', '.join(recipe_names())}"
        raise ConfigError(f"unknown recipe '{name}'{hint}; `megabatch recipes` shows what each one does")
    return RECIPES / f"{name}.toml"


def load_config(
    recipe: str, overrides: list[str] | None = None, *, scale: str | None = None, epochs: float | None = None
) -> Config:
    """Read a recipe, fit it to a small set (`scale`) and a number of epochs, apply `section.key=value` overrides.

    Overrides come last and win. Those of the data, the model and the ghost batch are part of the scale: batches are
    rounded to the ghost batch that will be used.
    """
    table = _read_with_base(recipe_path(recipe), seen=())
    source = f"recipe '{recipe}'"
    if scale is not None or epochs is not None:
        config = validate(table, source)
        if scale is not None:
            config = at_scale(config, read_profile(scale, overrides or []))
        if epochs is not None:
            config = over_epochs(config, epochs)
        table = config.model_dump(mode="json", exclude_none=True)
    for override in overrides or []:
        apply_override(table, override)
    return validate(table, source=source)


def config_from_toml(text: str, source: str) -> Config:
    """Read back what `Config.to_toml` wrote."""
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; restore the file or start a new run") from None
    return validate(table, source=source)


def _read_with_base(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"recipe '{path.name}' builds on itself through `base`; break the circle")
    try:
        table = parse_toml(read_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe '{path.name}' cannot be read: {error}; it must be a TOML file") from None
    base = table.pop("base", None)
    if base is None:
        return table
    sibling = path.parent / f"{base}.toml"
    base_path = sibling if sibling.is_file() else recipe_path(str(base))
    return _merged(_read_with_base(base_path, (*seen, path)), table)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        both_tables = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both_tables else value
    return result
