"""From run folders to files: the page, and figures with the CSV behind each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megabatch.report.figures.network import NetworkTimes
from megabatch.report.page import build_page, html_of
from megabatch.report.record import write_atomically
from megabatch.report.run import read_runs

__all__ = ["write_report"]


def write_report(folders: Sequence[Path], output: Path, times: NetworkTimes | None = None) -> None:
    """Write the page of one or more run folders."""
    runs = read_runs(folders)
    write_atomically(output, html_of(build_page(runs, times), runs))
