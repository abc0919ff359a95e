"""Closing the loop: what a plan said beside what the run that followed it measured, for a terminal.

The comparison itself is `megabatch.report.plan_compare`, which the report shows too.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megabatch.report.plan_compare import PlanComparison, compare_run

__all__ = ["compare_run", "print_comparison"]


def print_comparison(comparison: PlanComparison, console: Console | None = None) -> None:
    """A table for people, under a line that says where the run is not the plan's."""
    out = console or Console(highlight=False, soft_wrap=True)
    if comparison.differences:
        out.print(f"[yellow]{comparison.difference_line}[/yellow]")
    table = Table("part", "predicted [80 %]", "measured", "ratio", "n", "in", box=None, pad_edge=False)
    for column in table.columns[1:5]:
        column.justify = "right"
    for one in comparison.parts:
        unit = 1.0 if one.part in ("images/s", "training") else 1e3
        name = {"images/s": "images/s", "training": "training, s"}.get(one.part, f"{one.part}, ms")
        table.add_row(
            name,
            f"{unit * one.predicted:.4g} [{unit * one.low:.4g} {unit * one.high:.4g}]",
            f"{unit * one.measured:.4g}",
            f"{one.ratio:.2f}" if one.predicted else "-",
            str(one.num_measured),
            "yes" if one.inside else "NO",
        )
    out.print(table)
    out.print(f"[dim]{comparison.medians_line}[/dim]")
    if comparison.remark:
        out.print(comparison.remark)
