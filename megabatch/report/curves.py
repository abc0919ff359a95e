"""How the training went, by epoch: accuracy, loss, learning rate, batch, momentum, images/s, noise scale, members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megabatch.report.figure import Axis, Figure, Mark, Missing, Series, run_color
from megabatch.report.metrics import LEFT_OUT_STEPS, NUM_BUCKETS, Point
from megabatch.report.run import Run
from megabatch.report.units import count_text, percent_text
from megabatch.report.untrusted import items, number, table, text

__all__ = [
    "accuracy",
    "ensemble",
    "global_batch_size",
    "images_per_second",
    "loss",
    "lr",
    "momentum",
    "noise_scale",
]

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
    finding = "Accuracy by epoch"
    if len(runs) == 1 and best:
        finding = f"Top-1 reached {percent_text(best[0][0])} at epoch {count_text(-best[0][1])}"
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
    curves = [_Curve("global_batch_size", "global batch", "batch", mark="steps")]
    y = Axis("global batch [images]", from_zero=True)
    return _figure("global_batch_size", "Global batch by epoch", how, runs, curves, y)


def momentum(runs: Sequence[Run]) -> Figure | Missing:
    """The momentum each step was made with."""
    how = "The momentum each step was made with."
    curves = [_Curve("momentum", "momentum", "momentum", mark="steps")]
    return _figure("momentum", "Momentum by epoch", how, runs, curves, Axis("momentum", from_zero=True))


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
            series.append(_of_points(name, color, points, mark, curve.dashed))
    if not series:
        return Missing(key, title, f"no row of metrics.jsonl carries {curves[0].column}")
    if any(run.metrics.is_thinned for run in runs):
        how += f" Drawn from first, lowest, highest and last value of {NUM_BUCKETS} stretches of equally many steps."
    marks = runs[0].metrics.stages if len(runs) == 1 and len(runs[0].metrics.stages) > 1 else ()
    return Figure(key, title, how, EPOCH, y, tuple(series), marks)


def _of_points(name: str, color: str, points: Sequence[Point], mark: Mark = "line", dashed: bool = False) -> Series:
    xs, ys = tuple(p.epoch for p in points), tuple(p.value for p in points)
    return Series(name, color, xs, ys, mark=mark, dashed=dashed)


def noise_scale(runs: Sequence[Run]) -> Figure | Missing:
    """Noise scale (McCandlish 2018, arXiv 1812.06162: the batch beyond which more images help little) and batch."""
    key, title = "noise_scale", "Gradient noise scale and chosen batch"
    if len(runs) > 1:
        return Missing(key, title, "shown in the report of a single run")
    points = [p for p in runs[0].metrics.points("noise_scale") if p.value > 0]
    if not points:
        return Missing(key, title, "the run did not estimate the noise scale")
    series = [_of_points("noise scale", "noise", points)]
    batches = runs[0].metrics.points("global_batch_size")
    if batches:
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
    trunk, together = (
        number(runs[0].summary.get("trunk_top1")),
        number(table(runs[0].ensemble.get("ensemble")).get("top1")),
    )
    for line, color, top1 in (
        ("the run before its branches", "train", trunk),
        ("average of their predictions", "momentum", together),
    ):
        if top1 is not None:
            series.append(Series(line, color, names, (top1,) * len(values), dashed=True, n=n))
    if together is not None:
        best = percent_text(max(values))
        title = f"{len(values)} members together reach {percent_text(together)}, the best alone {best}"
    caption = (
        "Top-1 of each member, and of what the lines name, on all validation images. The axis does not begin at zero."
    )
    return Figure(key, title, caption, Axis("member", "category"), Axis("top-1 [%]", percent=True), tuple(series))


def _member_name(row: dict[str, Any], index: int) -> str:
    epoch = number(row.get("epoch"))
    return text(row.get("name"), 40) or (f"epoch {epoch:g}" if epoch is not None else f"member {index + 1}")
