"""Curves over epochs: accuracy, loss, learning rate, batch, momentum, images per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.report.figure import Axis, Figure, Mark, Missing, Series, run_color
from megabatch.report.metrics import LEFT_OUT_STEPS, NUM_BUCKETS
from megabatch.report.run import Run
from megabatch.report.units import count_text, percent_text

__all__ = ["accuracy", "global_batch_size", "images_per_second", "loss", "lr", "momentum"]

EPOCH = Axis("epoch")


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
    if len(runs) > 1:
        curves = curves[:1]
    best = [
        max((p.value, -p.epoch) for p in run.metrics.points("val_top1"))
        for run in runs
        if run.metrics.points("val_top1")
    ]
    if len(runs) == 1 and best:
        finding = f"Top-1 reached {percent_text(best[0][0])} at epoch {count_text(-best[0][1])}"
    else:
        finding = "Accuracy by epoch"
    how = "Every validation image counted once." + (
        "" if len(runs) > 1 else " The training curve counts augmented images as they were learned from."
    )
    return _figure("accuracy", finding, how, runs, curves, Axis("accuracy [%]", percent=True))


def loss(runs: Sequence[Run]) -> Figure | Missing:
    """Training and validation loss."""
    curves = [_Curve("loss", "training", "train"), _Curve("val_loss", "validation", "validation")]
    if len(runs) > 1:
        curves = curves[:1]
    how = "Cross-entropy per image, mean over the whole step on all workers."
    return _figure("loss", "Loss by epoch", how, runs, curves, Axis("loss [nats]"))


def lr(runs: Sequence[Run]) -> Figure | Missing:
    """The rate each step was made with."""
    how = "The rate each step was made with."
    curves = [_Curve("lr", "learning rate", "rate")]
    return _figure("lr", "Learning rate by epoch", how, runs, curves, Axis("learning rate", from_zero=True))


def global_batch_size(runs: Sequence[Run]) -> Figure | Missing:
    """The images of each step."""
    how = "Images in each step, over all workers and accumulated ghost batches."
    curves = [_Curve("global_batch_size", "total batch", "batch", mark="steps")]
    return _figure(
        "global_batch_size", "Total batch by epoch", how, runs, curves, Axis("total batch [images]", from_zero=True)
    )


def momentum(runs: Sequence[Run]) -> Figure | Missing:
    """The momentum each step was made with."""
    curves = [_Curve("momentum", "momentum", "momentum", mark="steps")]
    return _figure(
        "momentum",
        "Momentum by epoch",
        "The momentum each step was made with.",
        runs,
        curves,
        Axis("momentum", from_zero=True),
    )


def images_per_second(runs: Sequence[Run]) -> Figure | Missing:
    """Throughput of each step."""
    figure = _figure(
        "images_per_second",
        "Images per second by epoch",
        "Images of a step divided by its time, evaluations and checkpoints left out.",
        runs,
        [_Curve("images_per_second", "images/s", "speed")],
        Axis("throughput [images/s]", from_zero=True),
    )
    if isinstance(figure, Missing):
        return figure
    medians = []
    for run in runs:
        column = run.metrics.columns.get("images_per_second")
        middle, low, high = (column.quantile(q) if column else None for q in (0.5, 0.05, 0.95))
        if middle is None or low is None or high is None or column is None:
            continue
        of_run = f"{run.name}: " if len(runs) > 1 else ""
        medians.append(
            f"{of_run}median {count_text(middle)}, 5 % to 95 % {count_text(low)} to {count_text(high)}, "
            f"n = {len(column.sample):,}"
        )
    if not medians:
        return figure
    spread = f" {'; '.join(medians)} (first {LEFT_OUT_STEPS} steps left out)."
    return Figure(figure.key, figure.title, figure.caption + spread, figure.x, figure.y, figure.series, figure.marks)


def _figure(key: str, title: str, how: str, runs: Sequence[Run], curves: Sequence[_Curve], y: Axis) -> Figure | Missing:
    series = []
    for index, run in enumerate(runs):
        for curve in curves:
            points = run.metrics.points(curve.column)
            if not points:
                continue
            name = run.name if len(runs) > 1 else curve.name
            color = run_color(index) if len(runs) > 1 else curve.color
            # A handful of evaluations is a handful of dots, not a curve.
            mark: Mark = "points" if len(points) == 1 else curve.mark
            xs, ys = tuple(p.epoch for p in points), tuple(p.value for p in points)
            series.append(Series(name, color, xs, ys, mark=mark, dashed=curve.dashed))
    if not series:
        return Missing(key, title, f"no row of metrics.jsonl carries {curves[0].column}")
    thinned = any(run.metrics.is_thinned for run in runs)
    if thinned:
        how += f" Drawn from first, lowest, highest and last value of {NUM_BUCKETS} stretches of equally many steps."
    marks = runs[0].metrics.stages if len(runs) == 1 and len(runs[0].metrics.stages) > 1 else ()
    return Figure(key, title, how, EPOCH, y, tuple(series), marks)
