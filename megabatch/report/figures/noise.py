"""The gradient noise scale beside the batch that was chosen, and the members of an ensemble beside their whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megabatch.report.figure import Axis, Figure, Missing, Series
from megabatch.report.run import Run
from megabatch.report.units import percent_text
from megabatch.report.untrusted import items, number, table, text

__all__ = ["ensemble", "noise_scale"]


def noise_scale(runs: Sequence[Run]) -> Figure | Missing:
    """Noise scale (McCandlish 2018, arXiv 1812.06162: the batch beyond which more images help little) and batch."""
    key, title = "noise_scale", "Gradient noise scale and chosen batch"
    if len(runs) > 1:
        return Missing(key, title, "shown in the report of a single run")
    points = [p for p in runs[0].metrics.points("noise_scale") if p.value > 0]
    if not points:
        return Missing(key, title, "the run did not estimate the noise scale")
    series = [
        Series("noise scale", "noise", tuple(p.epoch for p in points), tuple(p.value for p in points)),
    ]
    batches = runs[0].metrics.points("global_batch_size")
    if batches:
        xs, ys = tuple(p.epoch for p in batches), tuple(p.value for p in batches)
        series.append(Series("total batch", "batch", xs, ys, mark="steps"))
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
    if trunk is not None:
        series.append(Series("the run before its branches", "train", names, (trunk,) * len(values), dashed=True, n=n))
    together = number(table(runs[0].ensemble.get("ensemble")).get("top1"))
    if together is not None:
        title = (
            f"{len(values)} members together reach {percent_text(together)}, the best alone {percent_text(max(values))}"
        )
        series.append(
            Series("average of their predictions", "momentum", names, (together,) * len(values), dashed=True, n=n)
        )
    caption = (
        "Top-1 of each member, and of what the lines name, on all validation images. The axis does not begin at zero."
    )
    return Figure(key, title, caption, Axis("member", "category"), Axis("top-1 [%]", percent=True), tuple(series))


def _member_name(row: dict[str, Any], index: int) -> str:
    epoch = number(row.get("epoch"))
    return text(row.get("name"), 40) or (f"epoch {epoch:g}" if epoch is not None else f"member {index + 1}")
