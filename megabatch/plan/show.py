"""What a person sees of plans, clusters, validations and comparisons: tables for 80 columns, reasons, figures.

`--figure front.svg` writes front.svg, front.png and front.csv, which holds every candidate with all its numbers, and
the same three for front_parts, the parts of a step. Both are figures of the report.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megabatch.files import write_atomically
from megabatch.plan.calibrate import Evidence
from megabatch.plan.cluster import Cluster
from megabatch.plan.estimate import Estimate
from megabatch.plan.fit import PARAMETERS, StepFit
from megabatch.plan.memory import device_bytes_of
from megabatch.plan.quantity import Interval
from megabatch.plan.search import FLAT_ALGORITHMS, PlanResult
from megabatch.plan.validate import RowResult, Validation
from megabatch.plan.workload import Workload
from megabatch.report.drawing import write_figures
from megabatch.report.figure import Axis, Figure, Series
from megabatch.report.plan_compare import PlanComparison
from megabatch.text import csv_text, seconds_text

_SHOWN = 12
_BAR = 30
_COLORS = {"compute": "compute", "exposed communication": "communication", "stragglers": "momentum", "loader": "data"}
"""The parts of a step, and the report's colour of each."""
_MOST_BARS = 7
_RULES = {
    "larger": "Rows of more than 64 workers, predicted from rows of at most 64",
    "others": "Rows of at most 64 workers, each predicted from the others of at most 64",
}


def print_plan(
    result: PlanResult, evidence: Evidence, workload: Workload, console: Console | None = None, epochs_from: str = ""
) -> None:
    """The candidates, the choice, its parts, what binds it, what would help, and what to be wary of."""
    out = console or _terminal()
    chosen, cluster = result.chosen, evidence.cluster
    out.print(f"[bold]{escape(workload.name)}[/bold] on {escape(cluster.title or cluster.name)}")
    gradients = f"gradients {workload.gradient_bytes / 1e6:.1f} MB on the wire"
    out.print(f"{workload.model}, {gradients}; {result.num_considered:,} candidates priced")
    for source in evidence.sources:
        out.print(f"calibrated by {escape(source)}")
    if evidence.fit is not None:
        _print_fit(out, evidence.fit)
    out.print()
    out.print(_candidates(result))
    for text in result.left_out:
        _print_note(out, "left out", text)
    way = chosen.candidate
    grid = f"grid {_grid(chosen)}, " if _grid(chosen) else ""
    workers = f"{way.workers:,} worker{'s' if way.workers > 1 else ''}"
    out.print(f"\n[bold]Choice[/bold] ({result.reason})")
    out.print(f"  {workers}, {way.algorithm}, {grid}buckets {_bucket(chosen)}")
    out.print(f"  global batch {chosen.batch}; ghost batch {chosen.step_time.ghost_batch_size}")
    if workload.memory is not None:
        ghost = chosen.step_time.ghost_batch_size
        memory = workload.memory.of_ghost(workload.ghost_batch_size, ghost)
        _print_note(out, "memory", "; ".join(memory.lines(ghost, device_bytes_of(cluster.accelerator))))
    _print_facts(out, chosen)
    out.print(f"\n[bold]One step[/bold], {seconds_text(chosen.step.middle)}")
    _print_bars(out, chosen.step_time.parts, chosen.step.middle)
    out.print(f"[bold]The whole run[/bold], {seconds_text(chosen.total.middle)}")
    _print_bars(out, chosen.time_parts, chosen.total.middle)
    out.print(f"[bold]Bound by[/bold] {result.binding}")
    out.print("Of the total time would save")
    for one in [one for one in result.sensitivity if one.gain >= 0.005][:4]:
        out.print(f"  {one.gain:>4.0%}  {one.what}")
    if epochs_from:
        _print_note(out, "epochs", f"from {epochs_from}")
    _print_reservations(out, result, evidence, workload)


def print_cluster(cluster: Cluster, values: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """A line for each value of `cluster_as_data`, then what counts as free because the file does not tell."""
    out = console or _terminal()
    out.print(f"[bold]{escape(cluster.name)}[/bold]  {escape(cluster.title)}")
    for entry in values:
        value = entry["value"]
        shown = f"{value:,g}" if isinstance(value, int | float) else str(value)
        line = f"{entry['key']:<33} {shown:>14}  {entry['certainty']:<9}"
        out.print(f"{escape(line)} [dim]{escape(entry['source'])}[/dim]")
    if cluster.unknown:
        out.print(f"not in the file, counted as free: {', '.join(cluster.unknown)}")


def print_validation(validation: Validation, console: Console | None = None) -> None:
    """Errors by row and by group."""
    out = console or _terminal()
    for rule, title in _RULES.items():
        rows = [row for row in validation.results if row.rule == rule]
        if rows:
            out.print(f"[bold]{title}[/bold]", _predicted_rows(rows), "", sep="\n")
    groups = _table("group", "rows", "median error", "largest", "in 80 % interval")
    for name, group in validation.as_data()["groups"].items():
        values = (group["median_error"], group["max_error"], group["coverage"])
        groups.add_row(name, str(group["num_rows"]), *("-" if value is None else f"{value:.1%}" for value in values))
    out.print(groups)
    for label, texts in (("not predicted", validation.refused), ("of the rows", validation.aside)):
        for text in texts:
            out.print(f"[yellow]{label}:[/yellow] {escape(text)}")


def print_comparison(comparison: PlanComparison, console: Console | None = None) -> None:
    """A table for people, under a line that says where the run is not the plan's."""
    out = console or _terminal()
    if comparison.differences:
        out.print(f"[yellow]{comparison.difference_line}[/yellow]")
    table = _table("part", "predicted [80 %]", "measured", "ratio", "n", "in", left=("part", "in"), pad_edge=False)
    units = {"images/s": ("images/s", 1.0), "training": ("training, s", 1.0)}
    for one in comparison.parts:
        name, unit = units.get(one.part, (f"{one.part}, ms", 1e3))
        predicted = f"{unit * one.predicted:.4g} [{unit * one.low:.4g} {unit * one.high:.4g}]"
        ratio, inside = f"{one.ratio:.2f}" if one.predicted else "-", "yes" if one.inside else "NO"
        table.add_row(name, predicted, f"{unit * one.measured:.4g}", ratio, str(one.num_measured), inside)
    out.print(table)
    out.print(f"[dim]{comparison.medians_line}[/dim]")
    if comparison.remark:
        out.print(comparison.remark)


def _print_fit(out: Console, fit: StepFit) -> None:
    """The parameters of a fit with their deviations, and which of them the rows leave to the prior."""
    units = {"per_image": ("us an image", 1e6), "scatter": ("us an image", 1e6), "evaluation": ("s", 1.0)}
    for name, value, deviation in zip(PARAMETERS, fit.parameters, fit.deviations, strict=True):
        if name == "evaluation" and not fit.logs_contain_evaluation:
            continue
        unit, factor = units.get(name, ("ms", 1e3))
        remark = "  not determined by the rows: the prior" if name in fit.undetermined else ""
        out.print(f"  {name:<12} {factor * value:>8.3g} +- {factor * deviation:<8.3g} {unit}[dim]{remark}[/dim]")


def _print_reservations(out: Console, result: PlanResult, evidence: Evidence, workload: Workload) -> None:
    """What widens the interval, what else to know, and what counts as free because nobody said."""
    for text in result.chosen.warnings:
        _print_note(out, "wider interval", text)
    if result.load.stages.global_batch_sizes != workload.stages.global_batch_sizes:
        _print_note(out, "note", f"the recipe's lr is for {workload.stages}: another batch needs its own")
    for text in result.chosen.notes:
        _print_note(out, "note", text)
    if evidence.cluster.unknown:
        _print_note(out, "note", f"not in the cluster file, counted as free: {', '.join(evidence.cluster.unknown)}")


def _print_note(out: Console, label: str, text: str) -> None:
    width = max(60, out.width)
    lines = textwrap.wrap(f"{label}: {text}", width, subsequent_indent="  ", break_on_hyphens=False)
    out.print(escape("\n".join(lines)).replace(f"{label}:", f"[yellow]{label}:[/yellow]", 1))


def _candidates(result: PlanResult) -> Table:
    money = result.chosen.cost is not None
    many_batches = len({one.batch for one in result.candidates}) > 1
    heads = ["workers", "algorithm", "grid", "bucket", *(["batch"] if many_batches else []), "step", "eff."]
    heads += ["training", escape(result.chosen.currency) or "cost" if money else "node h"]
    left = ("workers", "algorithm", "grid")
    table = _table(*heads, left=left, no_wrap=True, padding=(0, 2, 0, 0), pad_edge=False)
    for one in _worth_showing(result):
        mark = "> " if one is result.chosen else "* " if one in result.front else ""
        batch = [one.batch if len(one.batch) < 10 else "stages"] if many_batches else []
        way = (f"{mark:<2}{one.candidate.workers:>7,}", one.candidate.algorithm, _grid(one) or "-", _bucket(one))
        times = (seconds_text(one.step.middle), f"{one.step_time.efficiency:.0%}", seconds_text(one.training.middle))
        style = "bold" if one is result.chosen else ""
        table.add_row(*way, *batch, *times, f"{one.bill.middle:,.2f}", style=style)
    table.caption = "> chosen   * no other is both faster and cheaper"
    table.caption_justify = "left"
    return table


def _worth_showing(result: PlanResult) -> Sequence[Estimate]:
    """The choice, the front, then the fastest of the rest."""
    first = [result.chosen, *(one for one in result.front if one is not result.chosen)]
    rest = [one for one in result.candidates if not any(one is other for other in first)]
    return sorted((first + rest)[:_SHOWN], key=lambda one: one.total.middle)


def _print_facts(out: Console, chosen: Estimate) -> None:
    facts = [
        ("training", _time(chosen.training), "first step to last evaluation"),
        ("with initialisation", _time(chosen.total), "what the bill counts"),
        ("step", _time(chosen.step), f"{chosen.step_time.local_batch:g} images a worker"),
        ("steps", f"{chosen.steps:,}", ""),
        ("images/s", _spread(chosen.images_per_second, "{:,.0f}"), ""),
        ("efficiency", f"{chosen.step_time.efficiency:.0%}", "of a worker alone on the same images"),
        ("epochs", _spread(chosen.epochs, "{:.3g}"), ""),
        ("node hours", _spread(chosen.node_hours, "{:,.3g}"), ""),
    ]
    if chosen.cost is not None:
        facts.append(("cost", _spread(chosen.cost, "{:,.2f}"), escape(chosen.currency)))
    for name, value, remark in facts:
        out.print(f"  {name:<20} {value:<24} [dim]{remark}[/dim]" if remark else f"  {name:<20} {value}")


def _time(value: Interval) -> str:
    """In one unit, that of the middle."""
    middle, unit = seconds_text(value.middle).rsplit(" ", 1)
    low, high = (seconds_text(one, value.middle).rsplit(" ", 1)[0] for one in (value.low, value.high))
    return f"{middle} {unit} \\[{low} to {high}]"


def _spread(value: Interval, form: str) -> str:
    if value.high <= value.low * (1 + 1e-9):
        return form.format(value.middle)
    return f"{form.format(value.middle)} \\[{form.format(value.low)} to {form.format(value.high)}]"


def _print_bars(out: Console, parts: Mapping[str, float], whole: float) -> None:
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        if seconds <= 0:
            continue
        bar = "#" * max(1, round(_BAR * seconds / whole))
        out.print(f"  {name:<22} {seconds_text(seconds):>10} {seconds / whole:>5.0%} {bar}")


def _bucket(one: Estimate) -> str:
    size = one.candidate.bucket_mb
    return f"{size:g} MB" if math.isfinite(size) else "one"


def _grid(one: Estimate) -> str:
    """The grid of a candidate; empty when its algorithm does not use one."""
    return "" if one.candidate.algorithm in FLAT_ALGORITHMS else one.candidate.grid.text


def _terminal() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _table(*heads: str, left: Sequence[str] = (), no_wrap: bool = False, **options: Any) -> Table:
    """An empty table without lines; its numbers stand on the right, the first column and those of `left` do not."""
    table = Table(box=None, **options)
    for head in heads:
        on_left = head in (left or heads[:1])
        table.add_column(head, justify="left" if on_left else "right", no_wrap=no_wrap)
    return table


def _predicted_rows(rows: Sequence[RowResult]) -> Table:
    heads = ("system", "workers", "batch", "ms", "predicted [80 %]", "error", "in")
    table = _table(*heads, left=("system", "in"), no_wrap=True, padding=(0, 1, 0, 0))
    for row in rows:
        system = escape(row.row if len(row.row) <= 27 else f"{row.row[:25]}..")
        measured = (f"{row.workers:,}", f"{row.local_batch:g}", f"{row.measured_ms:.4g}")
        predicted = f"{row.predicted_ms:.4g} \\[{row.low_ms:.4g} {row.high_ms:.4g}]"
        table.add_row(system, *measured, predicted, f"{row.error:+.1%}", "yes" if row.covered else "NO")
    return table


def draw_plan(result: PlanResult, cluster: str, path: Path) -> None:
    """Write `path` with the suffixes .svg, .png and .csv, and the parts of a step beside it."""
    stem = path.stem if path.suffix in (".svg", ".png", ".csv") else path.name
    write_figures([_front_figure(result, cluster, stem), _parts_figure(result, f"{stem}_parts")], path.parent)
    write_atomically(path.parent / f"{stem}.csv", _csv(result))


def _front_figure(result: PlanResult, cluster: str, key: str) -> Figure:
    """Training time against cost: a dot a candidate, numbers of workers along the front."""
    chosen, training, way = result.chosen, result.chosen.training, result.chosen.candidate

    def points(found: Sequence[Estimate]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return tuple(one.bill.middle for one in found), tuple(one.training.middle for one in found)

    series = []
    for algorithm in dict.fromkeys(one.candidate.algorithm for one in result.candidates):
        mine = points([one for one in result.candidates if one.candidate.algorithm == algorithm])
        series.append(Series(algorithm.replace("_", " "), f"algorithm:{algorithm}", *mine, "simulated", "points"))
    front = sorted(result.front, key=lambda one: one.bill.middle)
    series.append(Series("neither faster nor cheaper exists", "ideal", *points(front), "simulated", dashed=True))
    spread = (training.low,), (training.high,)
    series.append(Series("chosen, 80 % interval", "noise", *points([chosen]), "simulated", "points", *spread))
    made = f"{way.workers:,} workers, {f'{way.algorithm} {_grid(chosen)}'.rstrip()}, {training.middle:,.0f} s"
    title = f"{result.load.name} on {cluster}: {made}"
    unit = f"cost [{chosen.currency}]" if chosen.cost is not None else "node hours"
    bills, seconds = points(result.candidates)
    x, y = Axis(f"{unit}, initialisation included", _scale(bills)), Axis("training time [s]", _scale(seconds))
    marks = tuple((one.bill.middle, f"{one.candidate.workers:,}") for one in front)
    caption = f"Best of every number of workers and algorithm; {result.num_considered:,} candidates priced."
    return Figure(key, title, caption, x, y, tuple(series), marks)


def _parts_figure(result: PlanResult, key: str) -> Figure:
    """What a step consists of along the front, as parts of one."""
    front = sorted(result.front, key=lambda one: one.candidate.workers)
    drawn = front[-_MOST_BARS:]
    labels = tuple(f"{one.candidate.workers:,}\n{seconds_text(one.step.middle)}" for one in drawn)
    series = []
    for part, color in _COLORS.items():
        heights = tuple(one.step_time.parts.get(part, 0.0) / one.step.middle for one in drawn)
        if any(heights):
            series.append(Series(part, color, labels, heights, "simulated", "bars", group="step"))
    cut = f", {len(drawn)} largest" if len(drawn) < len(front) else ""
    x, y = Axis("workers, time of a step", "category"), Axis("part of a step [%]", percent=True, from_zero=True)
    return Figure(key, f"Parts of a step, along the front{cut}", "Predicted.", x, y, tuple(series))


def _scale(values: Sequence[float]) -> Literal["log", "linear"]:
    """Powers of ten need a few of them to show; near values do better without."""
    return "log" if max(values) > 5 * min(values) else "linear"


def _csv(result: PlanResult) -> str:
    """Every candidate with all its numbers."""
    head = ("workers", "algorithm", "grid", "bucket_mb", "batch", "step_seconds", "training_seconds", "training_low")
    rows: list[Sequence[object]] = [(*head, "training_high", "node_hours", "cost", "front", "chosen")]
    for one in result.candidates:
        way = one.candidate
        numbers = (one.step.middle, one.training.middle, one.training.low, one.training.high, one.node_hours.middle)
        cost = f"{one.cost.middle:.6g}" if one.cost else ""
        marks = (int(one in result.front), int(one is result.chosen))
        row = (way.workers, way.algorithm, way.grid.text, way.bucket_mb, one.batch, *(f"{x:.6g}" for x in numbers))
        rows.append((*row, cost, *marks))
    return csv_text(rows)
