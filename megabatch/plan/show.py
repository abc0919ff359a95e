"""What a person sees of a plan: tables that fit a terminal of 80 columns, and reasons in words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megabatch.plan.evidence import Evidence
from megabatch.plan.interval import Interval
from megabatch.plan.planner import PlanResult
from megabatch.plan.predict import Prediction
from megabatch.plan.search import FLAT_ALGORITHMS
from megabatch.plan.step_fit import PARAMETERS, StepFit
from megabatch.plan.workload import Workload

__all__ = ["duration", "print_plan"]

_SHOWN = 12
_BAR = 30


def print_plan(result: PlanResult, evidence: Evidence, workload: Workload, console: Console | None = None) -> None:
    """The candidates, the choice, its parts, what binds it, what would help, and what to be wary of."""
    out = console or Console(highlight=False, soft_wrap=True)
    chosen, cluster = result.chosen, evidence.cluster
    out.print(f"[bold]{escape(workload.name)}[/bold] on {escape(cluster.title or cluster.name)}")
    mb = workload.gradient_bytes / 1e6
    out.print(f"{workload.model}, gradients {mb:.1f} MB on the wire; {result.num_considered:,} candidates priced")
    for source in evidence.sources:
        out.print(f"calibrated by {escape(source)}")
    if evidence.fit is not None:
        _print_fit(out, evidence.fit)
    out.print()
    out.print(_candidates(result))
    for text in result.left_out:
        _print_note(out, "left out", text)
    flat = chosen.candidate.algorithm in FLAT_ALGORITHMS
    grid = "" if flat else f"grid {chosen.candidate.grid.text}, "
    out.print(f"\n[bold]Choice[/bold] ({result.reason})")
    out.print(
        f"  {_workers(chosen)}, {chosen.candidate.algorithm}, {grid}buckets {_bucket(chosen)}\n"
        f"  total batch {chosen.batch}; ghost batch {chosen.ghost_batch_size}"
    )
    _print_facts(out, chosen)
    out.print(f"\n[bold]One step[/bold], {duration(chosen.step.middle)}")
    _print_bars(out, chosen.step_parts, chosen.step.middle)
    out.print(f"[bold]The whole run[/bold], {duration(chosen.total.middle)}")
    _print_bars(out, chosen.time_parts, chosen.total.middle)
    out.print(f"[bold]Bound by[/bold] {result.binding}")
    out.print("Of the total time would save")
    for one in [one for one in result.helps if one.gain >= 0.005][:4]:
        out.print(f"  {one.gain:>4.0%}  {one.what}")
    _print_reservations(out, result, evidence, workload)


def duration(seconds: float, like: float | None = None) -> str:
    """Seconds for people: "45.3 s", "12.4 min", "3.2 h", "2.1 days", "4.0 years"; in the unit of `like`, if given."""
    size = seconds if like is None else like
    for unit, factor in (("years", 365.25 * 86400.0), ("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if size >= 1.5 * factor:
            return f"{seconds / factor:,.1f} {unit}"
    return f"{seconds:.1f} s" if size >= 1 else f"{1e3 * seconds:.3g} ms"


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
        _print_note(out, "note", f"the recipe's rates are for {workload.stages}: another batch needs its own")
    for text in result.chosen.notes:
        _print_note(out, "note", text)
    if evidence.cluster.unknown:
        _print_note(out, "note", f"not in the cluster file, counted as free: {', '.join(evidence.cluster.unknown)}")


def _print_note(out: Console, label: str, text: str) -> None:
    width = max(60, out.width)
    lines = textwrap.wrap(f"{label}: {text}", width, subsequent_indent="  ", break_on_hyphens=False)
    out.print(escape("\n".join(lines)).replace(f"{label}:", f"[yellow]{label}:[/yellow]", 1))


def _workers(one: Prediction) -> str:
    return f"{one.candidate.workers:,} worker" + ("s" if one.candidate.workers > 1 else "")


def _candidates(result: PlanResult) -> Table:
    money = result.chosen.cost is not None
    many_batches = len({one.batch for one in result.candidates}) > 1
    heads = ["workers", "algorithm", "grid", "bucket", *(["batch"] if many_batches else []), "step", "eff."]
    heads += ["training", escape(result.chosen.currency) or "cost" if money else "node h"]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in ("workers", "algorithm", "grid") else "right", no_wrap=True)
    for one in _worth_showing(result):
        bill = one.cost if one.cost is not None else one.node_hours
        mark = "> " if one is result.chosen else "* " if one in result.front else ""
        batch = [one.batch if len(one.batch) < 10 else "stages"] if many_batches else []
        table.add_row(
            f"{mark:<2}{one.candidate.workers:>7,}",
            one.candidate.algorithm,
            one.candidate.grid.text if one.candidate.algorithm not in FLAT_ALGORITHMS else "-",
            _bucket(one),
            *batch,
            duration(one.step.middle),
            f"{one.efficiency:.0%}",
            duration(one.training.middle),
            f"{bill.middle:,.2f}",
            style="bold" if one is result.chosen else "",
        )
    table.caption = "> chosen   * no other is both faster and cheaper"
    table.caption_justify = "left"
    return table


def _worth_showing(result: PlanResult) -> Sequence[Prediction]:
    """The choice, the front, then the fastest of the rest."""
    first = [result.chosen, *(one for one in result.front if one is not result.chosen)]
    rest = [one for one in result.candidates if not any(one is other for other in first)]
    return sorted((first + rest)[:_SHOWN], key=lambda one: one.total.middle)


def _print_facts(out: Console, chosen: Prediction) -> None:
    facts = [
        ("training", _time(chosen.training), "first step to last evaluation"),
        ("with initialisation", _time(chosen.total), "what the bill counts"),
        ("step", _time(chosen.step), f"{chosen.local_batch:g} images a worker"),
        ("steps", f"{chosen.steps:,}", ""),
        ("images/s", _spread(chosen.images_per_second, "{:,.0f}"), ""),
        ("efficiency", f"{chosen.efficiency:.0%}", "of a worker alone on the same images"),
        ("epochs", _spread(chosen.epochs, "{:.3g}"), ""),
        ("node hours", _spread(chosen.node_hours, "{:,.3g}"), ""),
    ]
    if chosen.cost is not None:
        facts.append(("cost", _spread(chosen.cost, "{:,.2f}"), escape(chosen.currency)))
    for name, value, remark in facts:
        out.print(f"  {name:<20} {value:<24} [dim]{remark}[/dim]" if remark else f"  {name:<20} {value}")


def _time(value: Interval) -> str:
    """In one unit, that of the middle."""
    middle, unit = duration(value.middle).rsplit(" ", 1)
    low, high = (duration(one, value.middle).rsplit(" ", 1)[0] for one in (value.low, value.high))
    return f"{middle} {unit} \\[{low} to {high}]"


def _spread(value: Interval, form: str) -> str:
    if value.high <= value.low * (1 + 1e-9):
        return form.format(value.middle)
    return f"{form.format(value.middle)} \\[{form.format(value.low)} to {form.format(value.high)}]"


def _print_bars(out: Console, parts: Mapping[str, float], whole: float) -> None:
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        if seconds <= 0:
            continue
        share = seconds / whole
        bar = "#" * max(1, round(_BAR * share))
        out.print(f"  {name:<22} {duration(seconds):>10} {share:>5.0%} {bar}")


def _bucket(one: Prediction) -> str:
    size = one.candidate.bucket_mb
    return f"{size:g} MB" if math.isfinite(size) else "one"
