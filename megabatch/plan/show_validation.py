"""What a person sees of a validation: every predicted row with its error, then medians by group."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megabatch.plan.validate import RowResult, Validation

__all__ = ["print_validation"]

_RULES = {
    "larger": "Rows of more than 64 workers, predicted from rows of at most 64",
    "others": "Rows of at most 64 workers, each predicted from the others of at most 64",
}


def print_validation(validation: Validation, console: Console | None = None) -> None:
    """Errors by row and by group."""
    out = console or Console(highlight=False, soft_wrap=True)
    for rule, title in _RULES.items():
        rows = [row for row in validation.results if row.rule == rule]
        if rows:
            out.print(f"[bold]{title}[/bold]")
            out.print(_table(rows))
            out.print()
    groups = Table("group", "rows", "median error", "largest", "in 80 % interval", box=None)
    for column in groups.columns[1:]:
        column.justify = "right"
    for name, group in validation.as_data()["groups"].items():
        values = (group["median_error"], group["max_error"], group["coverage"])
        groups.add_row(name, str(group["num_rows"]), *("-" if value is None else f"{value:.1%}" for value in values))
    out.print(groups)
    for text in validation.refused:
        out.print(f"[yellow]not predicted:[/yellow] {escape(text)}")
    for text in validation.aside:
        out.print(f"[yellow]of the rows:[/yellow] {escape(text)}")


def _table(rows: Sequence[RowResult]) -> Table:
    table = Table("system", "workers", "batch", "ms", "predicted [80 %]", "error", "in", box=None, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:6]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            escape(row.row if len(row.row) <= 27 else f"{row.row[:25]}.."),
            f"{row.workers:,}",
            f"{row.local_batch:g}",
            f"{row.measured_ms:.4g}",
            f"{row.predicted_ms:.4g} \\[{row.low_ms:.4g} {row.high_ms:.4g}]",
            f"{row.error:+.1%}",
            "yes" if row.covered else "NO",
        )
    return table
