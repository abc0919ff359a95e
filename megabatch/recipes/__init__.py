"""Recipes: TOML files that say everything about a run except the machines it runs on.

A recipe opens with `[promise]`: the paper, the hardware, the time and the accuracy it claims, and what is unknown.
`base = "other"` starts from another recipe and changes what differs. `--set section.key=value` changes one setting.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megabatch.config import Config
from megabatch.errors import ConfigError, nearest
from megabatch.schedule.pieces import Piece

__all__ = ["config_from_toml", "load_config", "recipe_names", "recipe_path"]

RECIPES = Path(__file__).parent


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe, or `name` itself when it is a path to a TOML file."""
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise ConfigError(f"recipe file '{name}' does not exist; give a file, or a name from `megabatch recipes`")
        return Path(name)
    if name not in recipe_names():
        hint = nearest(name, recipe_names()) or f"; known: {', '.join(recipe_names())}"
        raise ConfigError(f"unknown recipe '{name}'{hint}; `megabatch recipes` shows what each one does")
    return RECIPES / f"{name}.toml"


def load_config(recipe: str, overrides: list[str] | None = None) -> Config:
    """Read a recipe, apply `section.key=value` overrides and check the whole."""
    table = _read_with_base(recipe_path(recipe), seen=())
    for override in overrides or []:
        _apply_override(table, override)
    return _validate(table, source=f"recipe '{recipe}'")


def config_from_toml(text: str, source: str) -> Config:
    """Read back what `Config.to_toml` wrote."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; restore the file or start a new run") from None
    return _validate(table, source=source)


def _read_with_base(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"recipe '{path.name}' builds on itself through `base`; break the circle")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
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


def _apply_override(table: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set '{override}' cannot be read; write section.key=value, for example train.epochs=2")
    node: Any = table
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                where = ".".join(keys[:depth])
                raise ConfigError(f"--set {name}: '{where}' has entries 0 to {len(node) - 1}, '{key}' is none of them")
            if last:
                node[int(key)] = _parse_value(text)
            node = node[int(key)]
        elif isinstance(node, dict):
            if last:
                node[key] = _parse_value(text)
            else:
                node = node.setdefault(key, {})
        else:
            where = ".".join(keys[:depth])
            raise ConfigError(f"--set {name}: '{where}' is a plain value and has no '{key}'; set '{where}' itself")


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _validate(table: dict[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_one_line(error, source)) from None


def _one_line(error: ValidationError, source: str) -> str:
    """The complaint of pydantic that says most, as one line: given, needed, what to do."""

    def key_path(complaint: Any) -> list[str]:
        # Besides keys and positions pydantic lists the branch of a union it tried, such as `tuple[Piece, ...]`.
        *path, last = complaint["loc"]
        known = [str(part) for part in path if isinstance(part, int) or _is_key(part)]
        is_key = complaint["type"] in ("extra_forbidden", "missing") or isinstance(last, int) or _is_key(last)
        return [*known, str(last)] if is_key else known

    first = max(error.errors(), key=lambda one: (one["type"] == "extra_forbidden", len(key_path(one))))
    names = key_path(first)
    where = ".".join(names)
    if first["type"] == "extra_forbidden":
        known = _known_keys(names[:-1])
        hint = nearest(names[-1], known) or f"; known: {', '.join(sorted(known))}"
        return f"unknown key '{where}' in {source}{hint}"
    if first["type"] == "missing":
        return f"{source} lacks '{where}'; add it"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    return f"'{where}' = {first['input']!r} in {source} cannot be used: {first['msg'][0].lower()}{first['msg'][1:]}"


def _is_key(part: object) -> bool:
    return str(part).isidentifier() and part not in ("int", "float", "str", "tuple")


def _known_keys(path: list[str]) -> list[str]:
    """The keys of the section at a dotted path."""
    section: type[BaseModel] = Config
    for name in path:
        field = section.model_fields.get(name)
        if field is None:
            break
        choices = [field.annotation, *get_args(field.annotation)]
        section = next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), Piece)
    return list(section.model_fields)
