"""The section of the page that says what went wrong, class by class; from `classes.json`, which may be a stranger's."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from html import escape
from typing import Any

from megabatch.report.run import Run
from megabatch.report.sections import MAX_TABLE_ROWS, html_table
from megabatch.report.untrusted import items, number, table, text, whole

MAX_MATRIX = 20  # classes; beyond, a list of the most frequent confusions
_MAX_MISTAKES = 24
_MAX_JPEG_BYTES = 50_000
_NAME = 40


def classes_section(runs: Sequence[Run]) -> str:
    """Accuracy by class, confusions and the most confident mistakes of one run; empty when there is nothing to show."""
    rows = [found for one in items(runs[0].classes.get("classes")) if (found := _class_row(one))]
    if len(runs) > 1 or not rows:
        return ""
    names = [row[0] for row in rows]
    known = (_pair(one, len(names)) for one in items(runs[0].classes.get("confusions"), 400))
    pairs = [pair for pair in known if pair is not None]
    worst = sorted(rows, key=lambda row: (float(row[3].rstrip("%") or "inf"), row[0]))[:MAX_TABLE_ROWS]
    head = ["class", "images", "correct", "accuracy", "most often taken for"]
    part = f"; {len(worst)} of {len(rows)}" if len(worst) < len(rows) else ""
    caption = f"Accuracy by class, the worst first{part}"
    out = ['<h2 id="classes-title">What went wrong</h2>', html_table(caption, head, worst)]
    if len(names) <= MAX_MATRIX:
        out.append(_matrix(names, rows, pairs))
    else:
        listed = [[names[t], names[p], str(count)] for t, p, count in pairs[:MAX_TABLE_ROWS]]
        out.append(html_table("Most frequent confusions", ["true class", "taken for", "images"], listed))
    mistakes = "".join(_mistake(table(one)) for one in items(runs[0].classes.get("mistakes"), _MAX_MISTAKES))
    if mistakes:
        out.append(f'<h3>The most confident mistakes</h3><ul class="mistakes">{mistakes}</ul>')
    return "\n".join(out)


def _class_row(one: Any) -> list[str]:
    name, images, correct, _, taken_for = (*items(one, 5), *5 * [None])[:5]
    num_images, num_correct = whole(images), whole(correct)
    if num_images is None or num_correct is None or num_correct > num_images:
        return []
    share = f"{num_correct / num_images:.1%}" if num_images else ""
    return [text(name, _NAME), str(num_images), str(num_correct), share, text(taken_for, _NAME)]


def _pair(one: Any, num_classes: int) -> tuple[int, int, int] | None:
    true, taken, count = (*items(one, 3), *3 * [None])[:3]
    found = whole(true, high=num_classes - 1), whole(taken, high=num_classes - 1), whole(count)
    return None if found[0] is None or found[1] is None or found[2] is None else (found[0], found[1], found[2])


def _matrix(names: Sequence[str], rows: Sequence[Sequence[str]], pairs: Sequence[tuple[int, int, int]]) -> str:
    counts = {(t, p): count for t, p, count in pairs}
    counts |= {(label, label): int(row[2]) for label, row in enumerate(rows)}
    cells = [[names[t], *(str(counts.get((t, p), 0)) for p in range(len(names)))] for t in range(len(names))]
    return html_table("Confusion matrix: rows are true classes, columns predicted ones", ["", *names], cells)


def _mistake(one: dict[str, Any]) -> str:
    share = number(one.get("probability"))
    words = f"{text(one.get('true'), _NAME)}, taken for {text(one.get('predicted'), _NAME)}" + (
        f" ({share:.1%})" if share is not None else ""
    )
    jpeg = one.get("jpeg")
    try:
        is_small = isinstance(jpeg, str) and len(jpeg) <= _MAX_JPEG_BYTES
        is_jpeg = is_small and base64.b64decode(str(jpeg), validate=True)[:2] == b"\xff\xd8"
    except (binascii.Error, ValueError):
        is_jpeg = False
    image = f'<img alt="{escape(text(one.get("image"), 200))}" src="data:image/jpeg;base64,{jpeg}">' if is_jpeg else ""
    return f"<li>{image}<span>{escape(words)}</span></li>"
