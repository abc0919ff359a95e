"""Reads what may be damaged, huge or hostile: every value is checked, every text bounded, every file limited.

A run folder may come from a stranger. Nothing in it may exhaust memory, hang the reader (a pipe in place of a file),
or reach a page as anything but text; `megabatch.report.page` escapes, this module makes sure there is only plain,
finite, bounded data to escape.
"""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megabatch.files import UnreadableError, parse_json, parse_toml, read_text

MAX_TEXT = 300
_CHUNK_BYTES = 2**20


def number(value: Any) -> float | None:
    """A finite number, or None for anything else; True and False are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def whole(value: Any, low: int = 0, high: int = 10**9) -> int | None:
    """A whole number between two bounds, or None."""
    found = number(value)
    return int(found) if found is not None and found == int(found) and low <= found <= high else None


def text(value: Any, limit: int = MAX_TEXT) -> str:
    """One line of visible characters: no controls, no direction overrides, no lone surrogates, at most `limit` long."""
    if value is None:
        return ""
    if isinstance(value, float | int) and not isinstance(value, bool) and number(value) is None:
        return "not a number"
    # A structure or a number of unknown size is not turned into text.
    is_small = value.bit_length() < 1024 if isinstance(value, int) else isinstance(value, str | float)
    raw = str(value)[: 2 * limit] if is_small else ""
    # Category C: controls, format characters (bidirectional overrides among them), surrogates, unassigned.
    visible = "".join(" " if c.isspace() else "" if unicodedata.category(c)[0] == "C" else c for c in raw)
    return visible if len(visible) <= limit else visible[: limit - 3] + "..."


def table(value: Any) -> dict[str, Any]:
    """The value if it is a table, else an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: Any, limit: int = 10_000) -> list[Any]:
    """The first `limit` elements if it is a list, else none."""
    return value[:limit] if isinstance(value, list) else []


def read_table(path: Path) -> dict[str, Any] | None:
    """The table in a JSON or TOML file, None when there is no file; UnreadableError: too large, cut, or no table."""
    is_toml = path.suffix == ".toml"
    try:
        content = read_text(path)
        value = parse_toml(content) if is_toml else parse_json(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(error.strerror or "cannot be read") from None
    except ValueError as error:
        raise UnreadableError(f"is not whole {'TOML' if is_toml else 'JSON'}") from error
    if not isinstance(value, dict | list):
        raise UnreadableError("is not a table")
    return value if isinstance(value, dict) else {"rows": value}


def bounded_lines(file: BinaryIO, limit_bytes: int) -> Iterator[bytes | None]:
    """Yield whole lines; None stands for a line longer than the limit, which is passed over in pieces.

    A last line without its end, left by a killed or a still writing run, is not yielded.
    """
    while line := file.readline(limit_bytes + 1):
        if line.endswith(b"\n"):
            yield line
            continue
        if len(line) <= limit_bytes:
            return
        while piece := file.read(_CHUNK_BYTES):
            end = piece.find(b"\n")
            if end >= 0:
                file.seek(end + 1 - len(piece), os.SEEK_CUR)
                yield None
                break
