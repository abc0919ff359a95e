"""What differs in the settings of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megabatch.report.run import Run
from megabatch.report.untrusted import table, text

__all__ = ["differing_settings", "flatten"]

MAX_SETTINGS = 2_000
MAX_DEPTH = 8
_ABSENT = "-"


def flatten(value: Any, prefix: str = "", depth: int = 0) -> dict[str, str]:
    """Dotted names and their values as text; tables deeper than any recipe are cut."""
    flat: dict[str, str] = {}
    for key, inner in table(value).items():
        name = f"{prefix}.{text(key, 60)}" if prefix else text(key, 60)
        if isinstance(inner, dict) and depth < MAX_DEPTH:
            flat |= flatten(inner, name, depth + 1)
        else:
            flat[name] = _show(inner)
        if len(flat) > MAX_SETTINGS:
            break
    return flat


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(dotted name, value of each run) wherever not all runs agree; what a recipe merely says of itself is left out."""
    flat = [flatten(run.config) for run in runs]
    names = sorted({name for one in flat for name in one if not name.startswith("reference.")})
    rows = [(name, [one.get(name, _ABSENT) for one in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _show(value: Any) -> str:
    if isinstance(value, list):
        shown = "; ".join(_show(inner) for inner in value[:20])
        return text(f"[{shown}{'; ...' if len(value) > 20 else ''}]")
    if isinstance(value, dict):
        return text(", ".join(f"{text(key, 40)}={_leaf(inner)}" for key, inner in list(value.items())[:20]))
    return _leaf(value)


def _leaf(value: Any) -> str:
    return "..." if isinstance(value, dict | list) else text(value)
