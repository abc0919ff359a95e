"""What a person sees of a plan and of a validation: tables that fit a terminal of 100 columns, and reasons in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from megabatch.plan.cluster import Cluster
from megabatch.plan.crosscheck import Crosscheck
from megabatch.plan.interval import Interval
from megabatch.plan.planner import FLAT_ALGORITHMS, PlanResult
from megabatch.plan.predict import Prediction
from megabatch.plan.validate import Validation
from megabatch.plan.workload import Workload

__all__ = ["duration", "print_check", "print_plan", "print_validation"]

_SHOWN = 12
_BAR = 30


def print_plan(result: PlanResult, cluster: Cluster, workload: Workload, console: Console | None = None) -> None:
    """The candidates, the choice, its parts, what binds it, what would help, and what to be wary of."""
    out = console or Console(highlight=False, soft_wrap=True)
    chosen = result.chosen
    out.print(f"[bold]{workload.name}[/bold] on {cluster.title or cluster.name}")
    mb = workload.gradient_bytes / 1e6
    out.print(f"{workload.model}, gradients {mb:.1f} MB on the wire; {result.num_considered:,} candidates priced\n")
    out.print(_candidates(result))
    grid = f"grid {chosen.candidate.grid.text}, " if chosen.candidate.workers > 1 else ""
    out.print(
        f"\n[bold]Choice[/bold] ({result.reason}): {chosen.candidate.workers:,} workers, "
        f"{chosen.candidate.algorithm}, {grid}buckets {_bucket(chosen)}, total batch {chosen.batch}"
    )
    _print_facts(out, chosen)
    out.print(f"\n[bold]One update[/bold], {1e3 * chosen.step.middle:.3g} ms")
    _print_bars(out, chosen.step_parts, chosen.step.middle, milliseconds=True)
    out.print(f"[bold]The whole run[/bold], {duration(chosen.total.middle)}")
    _print_bars(out, chosen.time_parts, chosen.total.middle, milliseconds=False)
    out.print(f"[bold]Bound by[/bold] {chosen.binding}")
    helps = [one for one in result.helps if one.gain >= 0.005][:4]
    if helps:
        words = ", ".join(f"{one.what} {one.gain:.0%}" for one in helps)
        out.print(f"[bold]Would save most[/bold] of the total time: {words}")
    for warning in chosen.warnings:
        out.print(f"[yellow]wider interval:[/yellow] {warning}")


def print_check(check: Crosscheck, console: Console | None = None) -> None:
    """One all-reduce of each size of bucket by three engines."""
    out = console or Console(highlight=False, soft_wrap=True)
    heads = ("bucket", "times", "mode", "closed form", "simulation", "SimGrid", "difference")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == "mode" else "right", no_wrap=True)
    for one in check.buckets:
        seconds = (one.closed_form_seconds, one.simulation_seconds, one.simgrid_seconds)
        times = (f"{1e3 * each:,.3f} ms" for each in seconds)
        table.add_row(f"{one.num_bytes / 2**20:.2f} MB", str(one.count), one.mode, *times, f"{one.error:+.3%}")
    out.print(f"[bold]Checked[/bold] with SimGrid {check.simgrid_version}, one all-reduce of each bucket")
    out.print(table)


def print_validation(validation: Validation, console: Console | None = None) -> None:
    """Errors by row and by group."""
    out = console or Console(highlight=False, soft_wrap=True)
    data = validation.as_data()
    table = Table("system", "workers", "batch", "ms", "predicted [80 %]", "error", "in", box=None, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:6]:
        column.justify = "right"
    for row in validation.results:
        if row.rule != "larger":
            continue
        table.add_row(
            row.row if len(row.row) <= 27 else f"{row.row[:25]}..",
            f"{row.workers:,}",
            f"{row.local_batch:g}",
            f"{row.measured_ms:.1f}",
            f"{row.predicted_ms:.1f} [{row.low_ms:.1f} {row.high_ms:.1f}]",
            f"{row.error:+.1%}",
            "yes" if row.covered else "NO",
        )
    out.print("[bold]Rows of more than 64 workers, predicted from rows of at most 64[/bold]")
    out.print(table)
    groups = Table("group", "rows", "median error", "largest", "in 80 % interval", box=None)
    for column in groups.columns[1:]:
        column.justify = "right"
    for name, group in data["groups"].items():
        values = (group["median_error"], group["max_error"], group["coverage"])
        groups.add_row(name, str(group["num_rows"]), *("-" if value is None else f"{value:.1%}" for value in values))
    out.print()
    out.print(groups)
    for text in (*validation.refused, *validation.aside):
        out.print(f"[yellow]not predicted:[/yellow] {text}")


def duration(seconds: float) -> str:
    """Seconds for people: "45.3 s", "12.4 min", "3.2 h", "2.1 days"."""
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _candidates(result: PlanResult) -> Table:
    money = result.chosen.cost is not None
    many_batches = len({one.batch for one in result.candidates}) > 1
    heads = ["workers", "algorithm", "grid", "bucket", *(["batch"] if many_batches else []), "update", "eff."]
    heads += ["training", result.chosen.currency or "cost" if money else "node h"]
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
        ("training", _spread(chosen.training, duration), "from the first update to the last evaluation"),
        ("with initialisation", _spread(chosen.total, duration), "what the bill counts"),
        (
            "update",
            _spread(chosen.step, duration),
            f"{chosen.local_batch:g} pictures a worker, {chosen.updates:,} updates",
        ),
        (
            "images/s",
            _spread(chosen.images_per_second, lambda value: f"{value:,.0f}"),
            f"efficiency {chosen.efficiency:.0%} against a worker alone on the same pictures",
        ),
        ("epochs", _spread(chosen.epochs, lambda value: f"{value:.3g}"), ""),
        ("node hours", _spread(chosen.node_hours, lambda value: f"{value:,.3g}"), ""),
    ]
    if chosen.cost is not None:
        facts.append(("cost", _spread(chosen.cost, lambda value: f"{value:,.2f}"), chosen.currency))
    for name, value, remark in facts:
        out.print(f"  {name:<20} {value:<34} [dim]{remark}[/dim]")


def _spread(value: Interval, form: Callable[[float], str]) -> str:
    if value.high <= value.low * (1 + 1e-9):
        return form(value.middle)
    return f"{form(value.middle)} [{form(value.low)} to {form(value.high)}]"


def _print_bars(out: Console, parts: Mapping[str, float], whole: float, *, milliseconds: bool) -> None:
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        if seconds <= 0:
            continue
        share = seconds / whole
        bar = "#" * max(1, round(_BAR * share))
        value = f"{1e3 * seconds:.3g} ms" if milliseconds else duration(seconds)
        out.print(f"  {name:<22} {value:>10} {share:>5.0%} {bar}")


def _bucket(one: Prediction) -> str:
    size = one.candidate.bucket_mb
    return f"{size:g} MB" if math.isfinite(size) else "one"
