"""What is left to do when the training itself is over: the ranks' times, and the report page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megabatch.report.page import write_report
from megabatch.train.stopwatch import Stopwatch, ranks_table

__all__ = ["gather_ranks", "report_at_the_end"]


def gather_ranks(watch: Stopwatch, hosts: list[str]) -> dict[str, Any]:
    """Mean seconds per part of a step on every rank; all ranks must call it."""
    means: list[list[float]] = [[] for _ in hosts]
    dist.all_gather_object(means, watch.means())
    return ranks_table(means, hosts, watch.num_steps)


def report_at_the_end(folder: Path, say: Callable[[str], None]) -> None:
    """Write `report.html` into the run folder. The run is finished and saved: whatever fails here is only said."""
    try:
        write_report([folder], folder / "report.html")
    except Exception as error:  # a page that cannot be made must not turn a finished run into a failed one
        say(f"the run is complete, but its report was not made ({error}); try: megabatch report {folder}")
