"""`section.key=value`: one setting changed in a table, at any depth."""

from __future__ import annotations

import tomllib
from typing import Any

from megabatch.errors import ConfigError

__all__ = ["apply_override"]


def apply_override(table: dict[str, Any], override: str) -> None:
    """Change one setting of a table in place.

    Raises:
        ConfigError: an override that cannot be read, or that names a place the table does not have.
    """
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
