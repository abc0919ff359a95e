"""Reads what may be damaged, huge or hostile: every value is checked, every text bounded, every file limited.

A run folder may come from a stranger. Nothing in it may exhaust memory, hang the reader (a pipe in place of a file),
or reach a page as anything but text; `megabatch.report.page` escapes, this module makes sure there is only plain,
finite, bounded data to escape.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tomllib
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "UnreadableError",
    "bounded_lines",
    "items",
    "number",
    "open_regular",
    "parse_json",
    "read_table",
    "table",
    "text",
    "whole",
]

MAX_TEXT = 300
MAX_FILE_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**20


class UnreadableError(Exception):
    """A file that is there but cannot be used; the message says why, without its content."""


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
    raw = str(value)[: 2 * limit] if _is_small(value) else ""
    # Category C: controls, format characters (bidirectional overrides among them), surrogates, unassigned.
    visible = "".join(" " if c.isspace() else "" if unicodedata.category(c)[0] == "C" else c for c in raw)
    return visible if len(visible) <= limit else visible[: limit - 3] + "..."


def _is_small(value: Any) -> bool:
    """Whether `str(value)` is surely cheap: a text or a number, not a structure of unknown size."""
    if isinstance(value, int):
        return value.bit_length() < 1024
    return isinstance(value, str | float)


def table(value: Any) -> dict[str, Any]:
    """The value if it is a table, else an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: Any, limit: int = 10_000) -> list[Any]:
    """The first `limit` elements if it is a list, else none."""
    return value[:limit] if isinstance(value, list) else []


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open an ordinary file for reading; a pipe or device, which could block for ever, is refused.

    Raises:
        FileNotFoundError: there is nothing.
        UnreadableError: there is something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(error.strerror or "cannot be opened") from None
    with os.fdopen(descriptor, "rb", buffering=_CHUNK_BYTES) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableError("is not an ordinary file")
        yield file


def parse_json(data: bytes) -> Any:
    """Parse JSON; raises UnreadableError for anything else, also for nesting that would overflow the stack."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableError("is not whole JSON") from error


def read_table(path: Path, limit_bytes: int = MAX_FILE_BYTES) -> dict[str, Any] | None:
    """The table in a JSON or TOML file, or None when there is no such file.

    Raises:
        UnreadableError: too large, truncated, or not a table.
    """
    try:
        with open_regular(path) as file:
            data = file.read(limit_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(error.strerror or "cannot be read") from None
    if len(data) > limit_bytes:
        raise UnreadableError(f"is larger than {limit_bytes // 2**20} MiB")
    if path.suffix == ".toml":
        try:
            return tomllib.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise UnreadableError("is not whole TOML") from error
    value = parse_json(data)
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
