"""From run folders to files, or to a page that is served: what `megabatch report` and the end of a run call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import track

from megabatch.errors import ConfigError
from megabatch.files import write_atomically
from megabatch.report.figure import Figure
from megabatch.report.figures.network import NetworkTimes
from megabatch.report.files import write_figures
from megabatch.report.gather import all_figures
from megabatch.report.live import LiveServer
from megabatch.report.network_file import read_network
from megabatch.report.page import build_page, html_of
from megabatch.report.run import Run, read_runs
from megabatch.report.untrusted import whole

__all__ = ["serve_report", "write_report", "write_report_files"]


def write_report(folders: Sequence[Path], output: Path, times: NetworkTimes | None = None) -> None:
    """Write the page of one or more run folders."""
    runs = read_runs(folders)
    write_atomically(output, html_of(build_page(runs, times), runs))


def write_report_files(
    folders: Sequence[Path],
    output: Path | None,
    figures: Path | None,
    network: Path | None,
    say: Callable[[str], None],
) -> None:
    """Write the page, and the figures where they are wanted; say where they are."""
    runs = read_runs(folders)
    times = _times(network, runs)
    page = output or (folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html"))
    if page.is_dir() or not page.absolute().parent.is_dir():
        raise ConfigError(f"--output '{page}' is not a file in an existing folder; give one, for example report.html")
    write_atomically(page, html_of(build_page(runs, times), runs))
    say(f"page           {page}")
    if figures is not None:
        found = [one for one in all_figures(runs, times) if isinstance(one, Figure)]
        files = write_figures(track(found, "figures", transient=True), figures)
        say(f"figures        {len(files)} files in {figures}")


def serve_report(folders: Sequence[Path], network: Path | None, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of runs that go on, until Ctrl-C."""
    server = LiveServer(folders, _times(network, read_runs(folders)), port)
    say(f"live page      {server.url}   (Ctrl-C stops it)")
    try:
        server.serve()
    except KeyboardInterrupt:
        say("stopped")


def _times(network: Path | None, runs: Sequence[Run]) -> NetworkTimes | None:
    if network is None:
        return None
    message_bytes = whole(runs[0].environment.get("gradient_bytes"), 1, 2**50) or 0
    return read_network(network, message_bytes)
