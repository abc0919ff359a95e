"""Small pieces of HTML. Every text goes through `html.escape` here; nothing else in the report writes a tag around text
of a run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from typing import Any

__all__ = ["chip", "definitions", "escape", "html_table", "json_for_script", "script_hash"]


def escape(value: str) -> str:
    """Text for element content or a quoted attribute."""
    return html.escape(value, quote=True)


def chip(value: str, kind: str = "") -> str:
    """A small rounded label."""
    return f'<span class="chip{" " + escape(kind) if kind else ""}">{escape(value)}</span>'


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], numeric: bool = True) -> str:
    """A table with a caption, scoped headings, and columns of numbers aligned."""

    def is_number(column: int) -> bool:
        cells = [row[column] for row in rows if row[column] not in ("", "-")]
        return numeric and bool(cells) and all(cell[:1].isdigit() or cell[:1] == "-" for cell in cells)

    right = [is_number(column) for column in range(len(head))]
    align = [' class="number"' if one else "" for one in right]
    top = "".join(f'<th scope="col"{a}>{escape(cell)}</th>' for cell, a in zip(head, align, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{a}>{escape(cell)}</td>" for cell, a in zip(row, align, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def definitions(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values."""
    return (
        '<dl class="facts">'
        + "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
        + "</dl>"
    )


def json_for_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever its strings say."""
    dumped = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_hash(source: str) -> str:
    """The Content-Security-Policy source that allows exactly this inline script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
