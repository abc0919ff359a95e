"""From a table to checked settings: overrides (`section.key=value`) and validation; a mistake becomes one line."""

from __future__ import annotations

import tomllib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megabatch.config import Config
from megabatch.errors import ConfigError, nearest
from megabatch.files import parse_toml
from megabatch.schedule.pieces import Piece

# Settings that had another name before 0.1 was released. A recipe that still has one is refused with the new name.
RENAMED = {
    "promise": "reference",
    "promise.pictures": "reference.images",
    "reference.pictures": "reference.images",
    "train.batch_total": "train.global_batch_size",
    "train.ghost_batch": "train.ghost_batch_size",
    "train.evaluation_batch": "train.evaluation_batch_size",
    "train.max_updates": "train.max_steps",
    "train.max_skipped_updates": "train.max_skipped_steps",
    "norm.newest_share": "norm.momentum",
    "comm.wire": "comm.grad_dtype",
    "checkpoint.every_updates": "checkpoint.every_steps",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.rate_factor": "optimizer.lr_factor",
    "optimizer.rmsprop_warmup.rate": "optimizer.rmsprop_warmup.lr",
    "collapse.learning_rate": "collapse.lr",
    "collapse.batch_total": "collapse.global_batch_size",
    "batch_control.noise": "batch_control.noise_rule",
    "batch_control.measure_every_updates": "batch_control.measure_every_steps",
    "batch_control.adaptive.max_batch_total": "batch_control.adaptive.max_global_batch_size",
    "batch_control.adaptive.lead_updates": "batch_control.adaptive.lead_steps",
    "data.max_train_pictures": "data.max_train_images",
    "data.held_out_pictures": "data.held_out_images",
}

_MOST_SAID = 10


def apply_override(table: dict[str, Any], override: str) -> None:
    """Change one setting of a table in place.

    Raises:
        ConfigError: an override that cannot be read, or that names a place the table does not have.
    """
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set '{override}' cannot be read; write section.key=value, for example train.epochs=2")
    for depth in range(len(keys), 0, -1):
        if (old := ".".join(keys[:depth])) in RENAMED:
            raise ConfigError(f"--set {name}: '{old}' is now called '{RENAMED[old]}'; use that name")
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
        return parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
    except ValueError as error:
        raise ConfigError(f"--set value '{text[:60]}...' cannot be used: {error}; give a smaller one") from None


def validate(table: dict[str, Any], source: str) -> Config:
    """The table as checked settings.

    Raises:
        ConfigError: one line with all mistakes: the key, what it was given and what it needs.
    """
    try:
        return Config.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_one_line(error, source)) from None


def _one_line(error: ValidationError, source: str) -> str:
    """All that is wrong in one line; of each mistake what is given, needed, and what to do."""
    found = [(_key_path(one), one) for one in error.errors()]
    unknown = [path[-1] for path, one in found if one["type"] == "extra_forbidden"]
    mistakes: dict[str, str] = {}
    for path, one in found:
        # What a value could have been instead says less than what is wrong inside of it.
        is_whole = any(len(other) > len(path) and other[: len(path)] == path for other, _ in found)
        # A key that is spelled wrong is also missing under its right name.
        is_misspelled = one["type"] == "missing" and any(nearest(word, path[-1:]) for word in unknown)
        if not is_whole and not is_misspelled:
            mistakes.setdefault(".".join(path), _said(path, one, source))
    lines = list(mistakes.values())
    if len(lines) == 1:
        return lines[0]
    shown = "; ".join(f"({number}) {line}" for number, line in enumerate(lines[:_MOST_SAID], start=1))
    return f"{len(lines)} mistakes: {shown}" + ("; and more" if len(lines) > _MOST_SAID else "")


def _key_path(complaint: Any) -> list[str]:
    """The keys to what a complaint is about; pydantic also lists branches of unions, such as `tuple[Piece, ...]`."""
    if not complaint["loc"]:
        return []
    *path, last = complaint["loc"]
    known = [str(part) for part in path if isinstance(part, int) or _is_key(part)]
    is_key = complaint["type"] in ("extra_forbidden", "missing") or isinstance(last, int) or _is_key(last)
    return [*known, str(last)] if is_key else known


def _said(names: list[str], complaint: Any, source: str) -> str:
    where = ".".join(names)
    if complaint["type"] == "extra_forbidden":
        if where in RENAMED:
            return f"'{where}' in {source} is now called '{RENAMED[where]}'; rename it"
        known = _known_keys(names[:-1])
        hint = nearest(names[-1], known) or f"; known: {', '.join(sorted(known))}"
        return f"unknown key '{where}' in {source}{hint}"
    if complaint["type"] == "missing":
        return f"{source} lacks '{where}'; add it"
    if complaint["type"] == "value_error":
        return str(complaint["ctx"]["error"])
    said = f"{complaint['msg'][0].lower()}{complaint['msg'][1:]}"
    return f"'{where}' = {complaint['input']!r} in {source} cannot be used: {said}"


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
