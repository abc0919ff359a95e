"""The figures of a search and their page: the metric by rate with every trial, importance, what pruning saved."""

from __future__ import annotations

from pathlib import Path

from megabatch.files import write_atomically
from megabatch.report.figure import Axis, Figure, Missing, Series, run_color
from megabatch.report.page import summary_page
from megabatch.tune.results import SearchResult
from megabatch.tune.space import LEVEL


def figures(found: SearchResult) -> list[Figure | Missing]:
    """Every figure, or why it is not there."""
    return [by_rate(found), importance_bars(found), what_was_saved(found)]


def by_rate(found: SearchResult) -> Figure | Missing:
    """A point per trial and length; diverged trials along the bottom."""
    plan, results = found.plan, found.trials
    dimension = next((one for one in plan.space if one.key == LEVEL), plan.space[0])
    title = f"{plan.metric} by {dimension.key}, every trial"
    scored = [one for one in results if one.numbers]
    if not scored:
        return Missing("tune_rate", title, "no trial has ended with a number")
    series = []
    for rung in plan.rungs:
        there = [one for one in scored if len(one.numbers) > rung.number]
        if there:
            series.append(
                Series(
                    name=f"after {rung.epochs:.3g} epochs",
                    color=run_color(rung.number),
                    x=tuple(one.values[dimension.key] for one in there),
                    y=tuple(one.numbers[rung.number] for one in there),
                    mark="points",
                    n=(1,) * len(there),
                )
            )
    lost = [one for one in results if one.outcome == "diverged" and not one.numbers]
    if lost:
        everything = [number for one in scored for number in one.numbers]
        bottom = min(everything) if plan.maximize else max(everything)
        series.append(
            Series(
                name="diverged (no number: drawn at the worst)",
                color="other",
                x=tuple(one.values[dimension.key] for one in lost),
                y=(bottom,) * len(lost),
                mark="points",
                n=(1,) * len(lost),
            )
        )
    caption = (
        f"Each point is one run of one trial, n = 1, one seed, on {plan.trial.data.held_out_images:,} images held out "
        "from the training set. The other settings of the search differ from point to point."
    )
    return Figure(
        "tune_rate",
        title,
        caption,
        Axis(dimension.key, kind="log" if dimension.log else "linear"),
        Axis(plan.metric, percent=plan.metric != "val_loss"),
        tuple(series),
    )


def importance_bars(found: SearchResult) -> Figure | Missing:
    """What each setting decides."""
    title, shares = "What decides the result", found.importance
    if not shares:
        return Missing("tune_importance", title, "too few trials have ended with different numbers")
    order = sorted(shares, key=lambda key: shares[key])
    bars = Series("importance", "train", tuple(order), tuple(shares[key] for key in order), mark="bars")
    caption = (
        f"Share of {found.plan.metric} at the shortest length that each setting decides within its range "
        "(PED-ANOVA, by Optuna). With few trials it is a hint."
    )
    axes = Axis("setting", kind="category"), Axis("importance", percent=True, from_zero=True)
    return Figure("tune_importance", title, caption, *axes, (bars,), horizontal=True)


def what_was_saved(found: SearchResult) -> Figure | Missing:
    """Images that each trial saw, and those that it would have seen at full length."""
    plan, results = found.plan, found.trials
    title = "What pruning saved"
    if len(plan.rungs) < 2 or not results:
        return Missing("tune_saved", title, "every trial runs at full length: nothing is pruned")
    names = tuple(str(one.number) for one in results)
    whole = plan.images(plan.rungs[-1])
    seen = tuple(float(one.images) for one in results)
    saved = tuple(float(max(0, whole - one.images)) for one in results)
    caption = (
        f"A run at full length sees {whole:,} images. A trial that is not pruned sees more, because its shorter "
        "runs come first."
    )
    return Figure(
        "tune_saved",
        title,
        caption,
        Axis("trial", kind="category"),
        Axis("images", from_zero=True),
        (
            Series("seen", "train", names, seen, mark="bars", group="images"),
            Series("not needed", "other", names, saved, tag="ideal", mark="bars", group="images"),
        ),
    )


def write_page(path: Path, name: str, found: SearchResult) -> list[Figure]:
    """Write the report of a search; returns the figures in it."""
    plan, wanted = found.plan, figures(found)
    ranges = [
        {"setting": one.key, "from": f"{one.low:.4g}", "to": f"{one.high:.4g}", "scale": "log" if one.log else "linear"}
        for one in plan.space
    ]
    title, tables = f"Tuning {name}: {plan.metric} on held-out images", {"Every trial": found.rows, "Ranges": ranges}
    words = {"name": name, "word": "search", "made_by": "megabatch tune"}
    write_atomically(path, summary_page(title, found.statements, wanted, tables, **words))
    return [one for one in wanted if isinstance(one, Figure)]
