"""Where the time of a step goes, on average and rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from megabatch.report.figure import Axis, Figure, Missing, Series
from megabatch.report.metrics import LEFT_OUT_STEPS
from megabatch.report.run import Run
from megabatch.report.units import percent_text, seconds_text
from megabatch.report.untrusted import items, number, table, text, whole

__all__ = ["ranks", "step_split"]

PARTS = (
    ("data_seconds", "waiting for data", "data"),
    ("forward_seconds", "forward", "forward"),
    ("backward_seconds", "backward", "backward"),
    ("communication_seconds", "exposed communication", "communication"),
    ("optimizer_seconds", "optimizer", "optimizer"),
)
MAX_RANKS = 32
_SECONDS = Axis("time per step [s]", from_zero=True)


def step_split(runs: Sequence[Run]) -> Figure | Missing:
    """Median seconds of each part of a step, stacked."""
    title = "Where a step's time goes"
    rows = {run.name: split for run in runs if (split := _split(run))}
    if not rows:
        return Missing("step_split", title, "no row of metrics.jsonl carries step_seconds after the first steps")
    parts = (*PARTS, ("compute_seconds", "forward, backward, optimizer", "compute"), _OTHER)
    series = []
    for column, name, color in parts:
        found = [(run, *split[column]) for run, split in rows.items() if column in split]
        if found:
            names, middles, lows, highs, counts = zip(*found, strict=True)
            series.append(
                Series(name, color, names, middles, low=lows, high=highs, n=counts, mark="bars", group="split")
            )
    if len(rows) == 1:
        title = _finding(next(iter(rows.values())))
    caption = (
        f"Median per step, means over workers, first {LEFT_OUT_STEPS} steps left out; hover for 5 % to 95 % "
        "and n. Exposed communication is what backward waits for gradients after its own work is done. The rest is "
        "what no part claims: statistics, the sum for the log, waiting for slower workers there."
    )
    return Figure("step_split", title, caption, Axis("run", "category"), _SECONDS, tuple(series), horizontal=True)


_OTHER = ("other_seconds", "rest", "other")
_Split = dict[str, tuple[float, float, float, int]]


def _split(run: Run) -> _Split:
    columns = run.metrics.columns
    whole_step = columns["step_seconds"].quantile(0.5) if "step_seconds" in columns else None
    if whole_step is None:
        return {}
    wanted = [name for name, _, _ in PARTS]
    if "forward_seconds" not in columns:
        wanted = ["data_seconds", "communication_seconds", "compute_seconds"]
    split: _Split = {}
    for name in wanted:
        column = columns.get(name)
        middle, low, high = (column.quantile(q) if column else None for q in (0.5, 0.05, 0.95))
        if column is not None and middle is not None and low is not None and high is not None:
            split[name] = (middle, low, high, len(column.sample))
    rest = max(0.0, whole_step - sum(part[0] for part in split.values()))
    split["other_seconds"] = (rest, rest, rest, len(columns["step_seconds"].sample))
    return split


def _finding(split: _Split) -> str:
    total = sum(part[0] for part in split.values())
    waiting = split.get("communication_seconds", (0.0,))[0]
    if total <= 0:
        return "Where a step's time goes"
    return f"{percent_text(waiting / total)} of a step's {seconds_text(total)} is exposed communication"


def ranks(runs: Sequence[Run]) -> Figure | Missing:
    """Seconds of each part on every rank: who is slow, and at what."""
    title = "Stragglers: time per step on every rank"
    if len(runs) > 1:
        return Missing("ranks", title, "shown in the report of a single run")
    found = []
    for row in items(runs[0].ranks.get("ranks"), 100_000):
        values = table(row)
        rank = whole(values.get("rank"))
        seconds = {name: number(values.get(name)) for name, _, _ in PARTS}
        if rank is not None and any(value is not None for value in seconds.values()):
            found.append((rank, text(values.get("host"), 40), seconds))
    if not found:
        return Missing("ranks", title, "the run wrote no times of single ranks (ranks.json)")
    work = {rank: _own_work(seconds) for rank, _, seconds in found}
    middle = median(work.values())
    slowest = max(work, key=lambda rank: (work[rank], -rank))
    shown = _extremes(found, work)
    xs = tuple(f"{rank} {host}" if len({h for _, h, _ in found}) > 1 else str(rank) for rank, host, _ in shown)
    steps = whole(runs[0].ranks.get("num_steps")) or 0
    series = []
    for name, label, color in PARTS:
        if all(seconds[name] is None for _, _, seconds in shown):
            continue
        ys = tuple(seconds[name] or 0.0 for _, _, seconds in shown)
        series.append(Series(label, color, xs, ys, mark="bars", group="ranks", n=(steps,) * len(ys)))
    if len(found) > 1 and middle > 0:
        title = (
            f"The slowest rank ({slowest}) works {percent_text(work[slowest] / middle - 1)} longer than the median rank"
        )
    left_out = whole(runs[0].ranks.get("left_out_steps")) or 0
    caption = (
        f"Mean over {steps:,} steps of each rank, the first {left_out} left out. A rank that is slow at data, "
        "forward or backward makes the others wait in communication. Own work is data, forward, backward and optimizer."
    )
    if len(shown) < len(found):
        caption += (
            f" The {len(shown) // 2} slowest and the {len(shown) // 2} fastest of {len(found):,} ranks are shown."
        )
    return Figure("ranks", title, caption, Axis("rank", "category"), _SECONDS, tuple(series))


def _own_work(seconds: dict[str, float | None]) -> float:
    return sum(value or 0.0 for name, value in seconds.items() if name != "communication_seconds")


_Row = tuple[int, str, dict[str, float | None]]


def _extremes(found: list[_Row], work: dict[int, float]) -> list[_Row]:
    if len(found) <= MAX_RANKS:
        return sorted(found, key=lambda row: row[0])
    ordered = sorted(found, key=lambda row: (-work[row[0]], row[0]))
    return ordered[: MAX_RANKS // 2] + ordered[-(MAX_RANKS // 2) :]
