"""`megabatch report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, examples

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch report runs/a",
        "megabatch report runs/a runs/b --output comparison.html",
        "megabatch report runs/a --figures figures/ --network calibration.json",
        "megabatch report --live runs/a",
    )
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    output: Annotated[
        Path | None,
        typer.Option(help="The page; by default report.html in the run folder, comparison.html for several."),
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write each figure here as SVG, PNG and CSV.")] = None,
    network: Annotated[
        Path | None, typer.Option(help="A file of `bench allreduce --output` (or its --json) for the network figures.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve the page on 127.0.0.1 while the run goes on.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --live; 0: any free one.")] = 0,
    debug: Debug = False,
) -> None:
    """One self-contained page of a run, or a comparison of several; opens from disk, needs no network."""
    if live:
        from megabatch.report.live import serve_report

        serve_report(runs, network, port, print)
    else:
        from megabatch.report.page import write_report_files

        write_report_files(runs, output, figures, network, print)
