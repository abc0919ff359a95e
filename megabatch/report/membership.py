"""Who took part in an elastic run: the number of workers by step, who came, who went, and what each change cost.

The rows are those of `membership.jsonl`; their values are untrusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from megabatch.report.figure import Axis, Figure, Missing, Series
from megabatch.report.run import Run
from megabatch.report.untrusted import items, number, text, whole
from megabatch.text import seconds_text

MAX_NAMES = 16
_LATEST_TIME = 253_402_300_799  # the last second of the year 9999


@dataclass(frozen=True, slots=True)
class Change:
    """One change of membership. before, after: numbers of workers. seconds: how long nobody could compute."""

    step: int
    before: int
    after: int
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    seconds: float
    grid: str
    time: str
    equipment: str  # hosts, processors, versions and threads of those who joined


def changes(run: Run) -> list[Change]:
    """The changes of membership in their order; rows that make no sense are passed over."""
    return [change for row in run.membership if (change := _change(row)) is not None]


def _change(row: dict[str, Any]) -> Change | None:
    step, after, seconds = whole(row.get("step")), whole(row.get("workers")), number(row.get("seconds"))
    if step is None or after is None or seconds is None or seconds < 0:
        return None
    lost, joined = (items(row.get(name)) for name in ("lost", "joined"))
    time = whole(int(number(row.get("time")) or 0), 1, _LATEST_TIME)
    return Change(
        step,
        max(0, after + len(lost) - len(joined)),
        after,
        tuple(text(name, 60) for name in lost[:MAX_NAMES]),
        tuple(text(name, 60) for name in joined[:MAX_NAMES]),
        seconds,
        text(row.get("grid"), 40),
        f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}" if time else "",
        "; ".join(dict.fromkeys(filter(None, map(_equipment, items(row.get("joined_with"))[:MAX_NAMES])))),
    )


def _equipment(row: Any) -> str:
    """Host, processor, version and threads of one worker; what is not told is left out."""
    if not isinstance(row, dict):
        return ""
    host, processor, torch, threads = (text(row.get(name), 60) for name in ("host", "processor", "torch", "threads"))
    return ", ".join(filter(None, [host, processor, torch and f"torch {torch}", threads and f"{threads} threads"]))


def membership(runs: Sequence[Run]) -> Figure | Missing:
    """Number of workers by step; losses and joins are marked and named."""
    key, title = "membership", "Who took part"
    if len(runs) > 1:
        return Missing(key, title, "shown in the report of a single run")
    found = changes(runs[0])
    if not found:
        return Missing(key, title, "the same workers took part all the time (membership.jsonl holds no change)")
    steps, counts = [0.0], [float(found[0].before)]
    for change in found:
        # Between two changes of the file a run may have been stopped, and resumed with another number of workers.
        for count in dict.fromkeys((change.before, change.after)):
            if count != counts[-1]:
                steps.append(float(change.step))
                counts.append(float(count))
    steps.append(float(max(found[-1].step, runs[0].metrics.num_rows)))
    counts.append(counts[-1])
    series = [Series("workers", "workers", tuple(steps), tuple(counts), mark="steps")]
    for word in ("lost", "joined"):
        there = [(one, names) for one in found if (names := getattr(one, word))]
        if there:
            xs, ys = tuple(float(one.step) for one, _ in there), tuple(float(one.after) for one, _ in there)
            labels = tuple(_label(names) for _, names in there)
            series.append(Series(word, word, xs, ys, mark="points", labels=labels))
    lost, joined = (sum(len(getattr(change, name)) for change in found) for name in ("lost", "joined"))
    seconds = sum(change.seconds for change in found)
    caption = (
        "Workers of each step. The others make a step again that a lost worker left unfinished, to the same bits. "
        "Seconds count from when the loss was noticed, or the newcomer was let in, until all were connected and in one "
        "state, on the main rank. The table under Conditions names who came and who went."
    )
    return Figure(
        key,
        f"{lost} workers lost and {joined} joined, in {seconds_text(seconds)} of waiting together",
        caption,
        Axis("step"),
        Axis("workers", from_zero=True),
        tuple(series),
    )


def change_rows(run: Run) -> tuple[list[str], list[list[str]]]:
    """The table of changes: headings and one row per change."""
    head = ["after step", "time (UTC)", "workers", "grid", "lost", "joined", "joined with", "seconds"]
    return head, [
        [
            str(one.step),
            one.time or "-",
            f"{one.before} to {one.after}",
            one.grid or "-",
            ", ".join(one.lost) or "-",
            ", ".join(one.joined) or "-",
            one.equipment or "-",
            f"{one.seconds:.2f}",
        ]
        for one in changes(run)
    ]


def _label(names: tuple[str, ...]) -> str:
    """Host and process of a worker; its name has random characters at its end, which the table shows."""
    return names[0].rpartition("-")[0] or names[0] if len(names) == 1 else f"{len(names)} workers"
