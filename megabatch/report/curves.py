"""The figures of runs: the training by epoch, where the time of a step goes, how throughput grows with workers.

Each is a function of the runs; it returns the figure, or why it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from megabatch.report.figure import (
    Axis,
    Figure,
    Mark,
    Missing,
    Series,
    algorithm_color,
    count_text,
    percent_text,
    run_color,
    seconds_text,
)
from megabatch.report.metrics import LEFT_OUT_STEPS, NUM_BUCKETS, Point, Quantiles
from megabatch.report.run import Run
from megabatch.report.untrusted import items, number, table, text, whole

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


@dataclass(frozen=True, slots=True)
class _Curve:
    """One column of the metrics and how it is drawn."""

    column: str
    name: str
    color: str
    mark: Mark = "line"
    dashed: bool = False


def accuracy(runs: Sequence[Run]) -> Figure | Missing:
    """Top-1 and top-5 on validation images, top-1 on training images."""
    curves = [
        _Curve("val_top1", "validation top-1", "validation"),
        _Curve("val_top5", "validation top-5", "validation5", dashed=True),
        _Curve("top1", "training top-1", "train"),
    ]
    finding, how = "Accuracy by epoch", "Every validation image counted once."
    if len(runs) == 1:
        how += " The training curve counts augmented images as they were learned from."
        if points := runs[0].metrics.points("val_top1"):
            best = max(points, key=lambda p: (p.value, -p.epoch))
            finding = f"Top-1 reached {percent_text(best.value)} at epoch {count_text(best.epoch)}"
    return _figure("accuracy", finding, how, runs, curves, Axis("accuracy [%]", percent=True))


def _by_epoch(key: str, title: str, how: str, y: Axis, *curves: _Curve) -> Callable[[Sequence[Run]], Figure | Missing]:
    """The function that makes a figure of columns of the metrics, as they are."""
    return lambda runs: _figure(key, title, how, runs, curves, y)


loss = _by_epoch(
    *("loss", "Loss by epoch", "Cross-entropy per image, mean over the whole step on all workers."),
    Axis("loss [nats]"),
    _Curve("loss", "training", "train"),
    _Curve("val_loss", "validation", "validation"),
)
lr = _by_epoch(
    *("lr", "Learning rate by epoch", "The learning rate each step was made with."),
    Axis("learning rate", from_zero=True),
    _Curve("lr", "learning rate", "lr"),
)
global_batch_size = _by_epoch(
    *("global_batch_size", "Global batch by epoch"),
    "Images in each step, over all workers and accumulated ghost batches.",
    Axis("global batch [images]", from_zero=True),
    _Curve("global_batch_size", "global batch", "batch", mark="steps"),
)
momentum = _by_epoch(
    *("momentum", "Momentum by epoch", "The momentum each step was made with."),
    Axis("momentum", from_zero=True),
    _Curve("momentum", "momentum", "momentum", mark="steps"),
)


def images_per_second(runs: Sequence[Run]) -> Figure | Missing:
    """Throughput of each step."""
    how = "Images of a step divided by its time, evaluations and checkpoints left out."
    curves = [_Curve("images_per_second", "images/s", "speed")]
    y = Axis("throughput [images/s]", from_zero=True)
    figure = _figure("images_per_second", "Images per second by epoch", how, runs, curves, y)
    medians = []
    for run in runs:
        if spread := run.metrics.quantiles("images_per_second"):
            of_run = f"{run.name}: " if len(runs) > 1 else ""
            middle, low, high = (count_text(value) for value in spread[:3])
            medians.append(f"{of_run}median {middle}, 5 % to 95 % {low} to {high}, n = {spread.n:,}")
    if isinstance(figure, Missing) or not medians:
        return figure
    said = f"{'; '.join(medians)} (first {LEFT_OUT_STEPS} steps left out)."
    return replace(figure, caption=f"{figure.caption} {said}")


def _figure(key: str, title: str, how: str, runs: Sequence[Run], curves: Sequence[_Curve], y: Axis) -> Figure | Missing:
    """The curves of a run, or the first of them for each of several runs."""
    series = []
    for index, run in enumerate(runs):
        for curve in curves[: 1 if len(runs) > 1 else None]:
            points = run.metrics.points(curve.column)
            if not points:
                continue
            name = run.name if len(runs) > 1 else curve.name
            color = run_color(index) if len(runs) > 1 else curve.color
            # A handful of evaluations is a handful of dots, not a curve.
            mark: Mark = "points" if len(points) == 1 else curve.mark
            series.append(_of_points(name, color, points, mark, curve.dashed))
    if not series:
        return Missing(key, title, f"no row of metrics.jsonl carries {curves[0].column}")
    if any(run.metrics.is_thinned for run in runs):
        how += f" Drawn from first, lowest, highest and last value of {NUM_BUCKETS} stretches of equally many steps."
    marks = runs[0].metrics.stages if len(runs) == 1 and len(runs[0].metrics.stages) > 1 else ()
    return Figure(key, title, how, Axis("epoch"), y, tuple(series), marks)


def _of_points(name: str, color: str, points: Sequence[Point], mark: Mark = "line", dashed: bool = False) -> Series:
    return Series(name, color, tuple(p.epoch for p in points), tuple(p.value for p in points), mark=mark, dashed=dashed)


def noise_scale(runs: Sequence[Run]) -> Figure | Missing:
    """Noise scale (McCandlish 2018, arXiv 1812.06162: the batch beyond which more images help little) and batch."""
    key, title = "noise_scale", "Gradient noise scale and chosen batch"
    if len(runs) > 1:
        return Missing(key, title, "shown in the report of a single run")
    points = [p for p in runs[0].metrics.points("noise_scale") if p.value > 0]
    if not points:
        return Missing(key, title, "the run did not estimate the noise scale")
    series = [_of_points("noise scale", "noise", points)]
    if batches := runs[0].metrics.points("global_batch_size"):
        series.append(_of_points("global batch", "batch", batches, "steps"))
    caption = (
        "The simple noise scale estimated from gradients of two batch sizes, smoothed as the run recorded it: far "
        "above the batch, a larger one would still pay; far below, it would not. Values of zero and below are left out."
    )
    return Figure(key, title, caption, Axis("epoch"), Axis("images", "log2"), tuple(series), runs[0].metrics.stages)


def ensemble(runs: Sequence[Run]) -> Figure | Missing:
    """Accuracy of every member of a collapsed ensemble (Codreanu 2017, arXiv 1711.04291) and of their average."""
    key, title = "ensemble", "Ensemble members"
    if len(runs) > 1:
        return Missing(key, title, "shown in the report of a single run")
    members = []
    for index, row in enumerate(items(runs[0].summary.get("members"), 200)):
        top1 = number(table(row).get("top1"))
        if top1 is not None:
            members.append((_member_name(table(row), index), top1))
    if not members:
        return Missing(key, title, "the run collected no ensemble members")
    names, values = zip(*members, strict=True)
    counted = number(runs[0].summary.get("val_images"))
    n = (int(counted),) * len(values) if counted else ()
    series = [Series("member", "validation", names, values, mark="points", n=n)]
    trunk = number(runs[0].summary.get("trunk_top1"))
    together = number(table(runs[0].ensemble.get("ensemble")).get("top1"))
    if trunk is not None:
        line = (trunk,) * len(values)
        series.append(Series("the run before its branches", "train", names, line, dashed=True, n=n))
    if together is not None:
        line = (together,) * len(values)
        series.append(Series("average of their predictions", "momentum", names, line, dashed=True, n=n))
        best = percent_text(max(values))
        title = f"{len(values)} members together reach {percent_text(together)}, the best alone {best}"
    caption = (
        "Top-1 of each member, and of what the lines name, on all validation images. The axis does not begin at zero."
    )
    return Figure(key, title, caption, Axis("member", "category"), Axis("top-1 [%]", percent=True), tuple(series))


def _member_name(row: dict[str, Any], index: int) -> str:
    epoch = number(row.get("epoch"))
    return text(row.get("name"), 40) or (f"epoch {epoch:g}" if epoch is not None else f"member {index + 1}")


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
