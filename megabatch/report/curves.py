"""The figures of training: accuracy, loss, learning rate, batch and more by epoch; several runs also by time and step.

Each is a function of the runs; it returns the figure, a sentence where it would be a flat line, or why it is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megabatch.report.figure import Axis, Constant, Figure, Mark, Missing, Series, run_color
from megabatch.report.metrics import LEFT_OUT_STEPS, NUM_BUCKETS, Point
from megabatch.report.run import Run, setting
from megabatch.report.untrusted import items, number, table, text
from megabatch.text import count_text, percent_text


@dataclass(frozen=True, slots=True)
class _Curve:
    """One column of the metrics and how it is drawn."""

    column: str
    name: str
    color: str
    mark: Mark = "line"
    dashed: bool = False
    is_noisy: bool = False  # differs from step to step by chance: drawn smoothed as well


def accuracy(runs: Sequence[Run]) -> Figure | Missing:
    """Top-1 and top-5 on validation images, top-1 on training images; of several runs top-1 alone."""
    title, how = "Accuracy by epoch", "Every validation image counted once."
    y = Axis("accuracy [%]", percent=True)
    if len(runs) > 1:
        return _compare(runs, "accuracy", title, how, "val_top1", y)
    how += " Training counts augmented images as they were learned from."
    if points := runs[0].metrics.points("val_top1"):
        best = max(points, key=lambda p: (p.value, -p.epoch))
        title = f"Top-1 reached {percent_text(best.value)} at epoch {count_text(best.epoch)}"
    curves = (
        _Curve("top1", "training top-1", "train", is_noisy=True),
        _Curve("val_top5", "validation top-5", "validation5", dashed=True),
        _Curve("val_top1", "validation top-1", "validation"),
    )
    return _of_run(runs[0], "accuracy", title, how, curves, y)


def accuracy_by_time(runs: Sequence[Run]) -> Figure | Missing:
    """Top-1 of several runs by the time since their first step: what one wants to know first."""
    how = "Minutes since the first step, evaluations and checkpoints included. Every validation image counted once."
    y = Axis("top-1 [%]", percent=True)
    return _compare(runs, "accuracy_by_time", "Accuracy by time", how, "val_top1", y, x="time [min]")


def accuracy_by_step(runs: Sequence[Run]) -> Figure | Missing:
    """Top-1 of several runs by optimizer step."""
    how = "A step of a larger batch sees more images. Every validation image counted once."
    y = Axis("top-1 [%]", percent=True)
    return _compare(runs, "accuracy_by_step", "Accuracy by step", how, "val_top1", y, x="step")


def loss(runs: Sequence[Run]) -> Figure | Missing:
    """Loss on training and validation images; says what label smoothing does to it."""
    title, how = "Loss by epoch", "Cross-entropy per image, mean over the whole step on all workers."
    y = Axis("loss [nats]")
    if len(runs) > 1:
        return _compare(runs, "loss", title, how, "loss", y)
    smoothing = number(setting(runs[0], "train.label_smoothing"))
    if smoothing and runs[0].metrics.points("val_loss"):
        how += (
            f" Training compares with smoothed labels (label smoothing {smoothing:g}), validation with plain ones. So "
            "the training loss cannot reach zero, and it may lie above the validation loss with nothing wrong."
        )
    if any(number(setting(runs[0], f"data.augment.{name}")) for name in ("mixup", "cutmix")):
        how += " Training images are mixtures of two, with the labels of both, which are harder than validation images."
    curves = (_Curve("loss", "training", "train", is_noisy=True), _Curve("val_loss", "validation", "validation"))
    return _of_run(runs[0], "loss", title, how, curves, y)


def gradient_norm(runs: Sequence[Run]) -> Figure | Missing:
    """Norm of the summed gradient of each step."""
    title, how = "Gradient norm by epoch", "Norm of the mean gradient of each step, before any clipping."
    y = Axis("gradient norm [1]", from_zero=True)
    if len(runs) > 1:
        return _compare(runs, "gradient_norm", title, how, "gradient_norm", y)
    curve = _Curve("gradient_norm", "gradient norm", "noise", is_noisy=True)
    return _of_run(runs[0], "gradient_norm", title, how, (curve,), y)


def lr(runs: Sequence[Run]) -> Figure | Missing | Constant:
    """Learning rate of each step."""
    curve = _Curve("lr", "learning rate", "lr")
    return _setting(runs, "lr", "Learning rate", "The learning rate each step was made with.", curve, "learning rate")


def global_batch_size(runs: Sequence[Run]) -> Figure | Missing | Constant:
    """Images of each step."""
    how = "Images in each step, over all workers and accumulated ghost batches."
    curve = _Curve("global_batch_size", "global batch", "batch", mark="steps")
    return _setting(runs, "global_batch_size", "Global batch", how, curve, "global batch [images]")


def momentum(runs: Sequence[Run]) -> Figure | Missing | Constant:
    """Momentum of each step."""
    curve = _Curve("momentum", "momentum", "momentum", mark="steps")
    return _setting(runs, "momentum", "Momentum", "The momentum each step was made with.", curve, "momentum")


def _setting(
    runs: Sequence[Run], key: str, name: str, how: str, curve: _Curve, axis: str
) -> Figure | Missing | Constant:
    """What a schedule made of a setting: a curve, or a sentence when it was the same in every step."""
    title = f"{name} by epoch"
    flat = [(run.name, said) for run in runs if (said := _flat(run.metrics.points(curve.column)))]
    if len(flat) == len(runs):
        sentences = {said for _, said in flat}
        text = sentences.pop() if len(sentences) == 1 else "; ".join(f"{run} {said}" for run, said in flat)
        return Constant(key, name, text)
    y = Axis(axis, from_zero=True)
    if len(runs) > 1:
        return _compare(runs, key, title, how, curve.column, y, mark=curve.mark)
    return _of_run(runs[0], key, title, how, (curve,), y)


def _flat(points: Sequence[Point]) -> str:
    """ "0.9 in every step"; "" when the values differ. The last step of a run may be cut short: that is said."""
    values = [point.value for point in points]
    if len(values) < 2 or len(set(values[:-1])) > 1:
        return ""
    if values[-1] == values[0]:
        return f"{_plain(values[0])} in every step"
    # Only a batch is cut at the end, and only after enough equal steps to call it constant.
    if len(values) < 20 or not 0 < values[-1] < values[0] or any(value != int(value) for value in values):
        return ""
    return f"{_plain(values[0])} in every step but the last, which takes the {_plain(values[-1])} that are left"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.6g}"


def images_per_second(runs: Sequence[Run]) -> Figure | Missing:
    """Throughput of each step."""
    title, y = "Images per second by epoch", Axis("throughput [images/s]", from_zero=True)
    how = "Images of a step divided by its time, evaluations and checkpoints left out."
    medians = []
    for run in runs:
        if spread := run.metrics.quantiles("images_per_second"):
            of_run = f" of {run.name}" if len(runs) > 1 else ""
            middle, low, high = (count_text(value) for value in spread[:3])
            medians.append(f"Median{of_run} {middle}, 5 % to 95 % {low} to {high}, n = {spread.n:,}")
    if medians:
        how += f" {'; '.join(medians)} (first {LEFT_OUT_STEPS} steps left out)."
    if len(runs) > 1:
        return _compare(runs, "images_per_second", title, how, "images_per_second", y)
    curve = _Curve("images_per_second", "images/s", "speed", is_noisy=True)
    return _of_run(runs[0], "images_per_second", title, how, (curve,), y)


def _of_run(run: Run, key: str, title: str, how: str, curves: Sequence[_Curve], y: Axis) -> Figure | Missing:
    """Columns of one run by epoch; a noisy one as its smoothed curve before the single steps."""
    series = []
    for curve in curves:
        points = run.metrics.points(curve.column)
        if not points:
            continue
        # A handful of evaluations is a handful of dots, not a curve.
        mark: Mark = "points" if len(points) == 1 else curve.mark
        smooth = run.metrics.smoothed(curve.column) if curve.is_noisy else []
        if smooth:
            series.append(replace(_of_points(f"{curve.name}, each step", curve.color, points), faint=True))
        name = f"{curve.name}, smoothed" if smooth else curve.name
        series.append(_of_points(name, curve.color, smooth or points, mark, curve.dashed))
    if not series:
        return Missing(key, title, f"no row of metrics.jsonl carries {curves[-1].column}")
    if any(one.faint for one in series):
        how += " Smoothed: the mean over 1/25 of the run around each place."
    if run.metrics.is_thinned:
        how += _thinned("Single steps are drawn from")
    marks = run.metrics.stages if len(run.metrics.stages) > 1 else ()
    return Figure(key, title, how, Axis("epoch"), y, tuple(series), marks)


def _compare(
    runs: Sequence[Run], key: str, title: str, how: str, column: str, y: Axis, x: str = "epoch", mark: Mark = "line"
) -> Figure | Missing:
    """One column of several runs, smoothed where there are many values, by epoch, step or time."""
    series = []
    for index, run in enumerate(runs):
        points = (run.metrics.smoothed(column) if mark == "line" else []) or run.metrics.points(column)
        if x == "step":
            points = [p._replace(epoch=p.step) for p in points]
        elif x != "epoch":
            points = [p._replace(epoch=p.seconds / 60) for p in points if p.seconds is not None]
        if points:
            series.append(_of_points(run.name, run_color(index), points, "points" if len(points) == 1 else mark))
    if not series:
        return Missing(key, title, f"no row of metrics.jsonl carries {column}" + ("" if x == "epoch" else f" and {x}"))
    if any(run.metrics.smoothed(column) for run in runs) and mark == "line":
        how += " Each curve is the mean over 1/25 of its run around each place."
    elif any(run.metrics.is_thinned for run in runs):
        how += _thinned("Drawn from")
    return Figure(key, title, how, Axis(x), y, tuple(series))


def _thinned(begin: str) -> str:
    return f" {begin} first, lowest, highest and last value of {NUM_BUCKETS} stretches of equally many steps."


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
