"""The figures of speed: where the time of a step goes, who is slow, how throughput grows with workers.

Each is a function of the runs; it returns the figure, or why it is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from megabatch.report.figure import Axis, Figure, Missing, Series, algorithm_color
from megabatch.report.metrics import LEFT_OUT_STEPS, Quantiles
from megabatch.report.run import Run
from megabatch.report.untrusted import items, number, table, text, whole
from megabatch.text import percent_text, seconds_text

PARTS = (
    ("data_seconds", "waiting for data", "data"),
    ("forward_seconds", "forward", "forward"),
    ("backward_seconds", "backward", "backward"),
    ("communication_seconds", "exposed communication", "communication"),
    ("optimizer_seconds", "optimizer", "optimizer"),
)
_WHEN_NOT_SPLIT = (("compute_seconds", "forward, backward, optimizer", "compute"), ("other_seconds", "rest", "other"))
MAX_RANKS = 32
_SECONDS = Axis("time per step [s]", from_zero=True)


def step_split(runs: Sequence[Run]) -> Figure | Missing:
    """Median seconds of each part of a step, stacked."""
    title = "Where a step's time goes"
    rows = {run.name: split for run in runs if (split := _split(run))}
    if not rows:
        return Missing("step_split", title, "no row of metrics.jsonl carries step_seconds after the first steps")
    series = []
    for column, name, color in (*PARTS, *_WHEN_NOT_SPLIT):
        found = [(run, *split[column]) for run, split in rows.items() if column in split]
        if found:
            names, middles, lows, highs, counts = zip(*found, strict=True)
            series.append(
                Series(name, color, names, middles, low=lows, high=highs, n=counts, mark="bars", group="split")
            )
    total = sum(one.y[0] for one in series)
    if len(rows) == 1 and total > 0:
        waiting = sum(one.y[0] for one in series if one.color == "communication")
        title = f"{percent_text(waiting / total)} of a step's {seconds_text(total)} is exposed communication"
    caption = (
        f"Median per step, means over workers, first {LEFT_OUT_STEPS} steps left out; hover for 5 % to 95 % "
        "and n. Exposed communication is what backward waits for gradients after its own work is done. The rest is "
        "what no part claims: statistics, the sum for the log, waiting for slower workers there."
    )
    return Figure("step_split", title, caption, Axis("run", "category"), _SECONDS, tuple(series), horizontal=True)


def _split(run: Run) -> dict[str, Quantiles]:
    """Seconds of each part, and of what is left."""
    step = run.metrics.quantiles("step_seconds")
    if step is None:
        return {}
    wanted = [name for name, _, _ in PARTS]
    if "forward_seconds" not in run.metrics.columns:
        wanted = ["data_seconds", "communication_seconds", "compute_seconds"]
    split = {name: spread for name in wanted if (spread := run.metrics.quantiles(name))}
    rest = max(0.0, step.middle - sum(part.middle for part in split.values()))
    return split | {"other_seconds": Quantiles(rest, rest, rest, step.n)}


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
    own_work = [name for name, _, _ in PARTS if name != "communication_seconds"]
    work = {rank: sum(seconds[name] or 0.0 for name in own_work) for rank, _, seconds in found}
    middle = median(work.values())
    slowest = max(work, key=lambda rank: (work[rank], -rank))
    shown = sorted(found, key=lambda row: row[0])
    if len(found) > MAX_RANKS:  # the slowest and the fastest
        shown.sort(key=lambda row: -work[row[0]])
        shown = shown[: MAX_RANKS // 2] + shown[-(MAX_RANKS // 2) :]
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


def efficiency(runs: Sequence[Run]) -> Figure | Missing:
    """Images per second and worker, relative to the smallest world, per all-reduce algorithm."""
    key, title = "efficiency", "Scaling efficiency"
    by_algorithm: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        speed = run.metrics.quantiles("images_per_second")
        if run.world_size and speed and speed.middle:
            by_algorithm.setdefault(run.algorithm, {}).setdefault(run.world_size, []).append(speed.middle)
    counts = {workers for speeds in by_algorithm.values() for workers in speeds}
    if len(counts) < 2:
        return Missing(key, title, "it takes runs with different numbers of workers: megabatch report RUN RUN ...")
    base = min(counts)
    base_speeds = [speed for speeds in by_algorithm.values() for speed in speeds.get(base, [])]
    per_worker = sum(base_speeds) / len(base_speeds) / base
    series = []
    for algorithm in sorted(by_algorithm):
        workers = sorted(by_algorithm[algorithm])
        parts = {count: [speed / count / per_worker for speed in by_algorithm[algorithm][count]] for count in workers}
        series.append(
            Series(
                algorithm,
                algorithm_color(algorithm),
                tuple(float(count) for count in workers),
                tuple(sum(parts[count]) / len(parts[count]) for count in workers),
                low=tuple(min(parts[count]) for count in workers),
                high=tuple(max(parts[count]) for count in workers),
                n=tuple(len(parts[count]) for count in workers),
                mark="line" if len(workers) > 1 else "points",
            )
        )
    most = max(counts)
    series.append(Series("ideal", "ideal", (float(base), float(most)), (1.0, 1.0), tag="ideal", dashed=True))
    best = max(y for one in series[:-1] for x, y in zip(one.x, one.y, strict=True) if x == most)
    title = f"{percent_text(best)} scaling efficiency at {most:,} workers"
    caption = (
        f"Median images/s of a run per worker, over that of {base} worker{'s' if base > 1 else ''}; bars from "
        "the lowest to the highest of n runs. The ideal line is every worker as fast as in the smallest world."
    )
    y = Axis("efficiency [%]", percent=True, from_zero=True)
    return Figure(key, title, caption, Axis("workers", "log2"), y, tuple(series))
