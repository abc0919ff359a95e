"""What a run measures: seconds per part of a step, the row of a step, the summary, and where they are written.

Parts are data (waiting for images), forward, backward (without what follows), communication (gradients that nothing
hides any more) and optimizer. They are read from the host's clock, so on CUDA, where the host runs ahead of the
device, forward, backward and optimizer are not known and stay NaN.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megabatch.comm.messages import gather
from megabatch.config import Config
from megabatch.report.page import write_report
from megabatch.report.run import MetricsLog
from megabatch.train.evaluate import Evaluation
from megabatch.train.loggers import LogContext, open_loggers
from megabatch.train.state import RunState

PARTS = ("data", "forward", "backward", "communication", "optimizer")

# The first steps pay for memory, caches and connections, and would make every rank look like a straggler.
WARM_UP_STEPS = 3


class Stopwatch:
    """Laps of one step at a time; `sums` grow over the steps that count."""

    def __init__(self, host_clock_tells: bool) -> None:
        self._host_clock_tells = host_clock_tells
        self._last_seconds = 0.0
        self._num_seen = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.sums = dict.fromkeys(PARTS, 0.0)
        self.num_steps = 0

    def begin(self) -> None:
        """A step begins."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        if not self._host_clock_tells:
            self.seconds |= dict.fromkeys(("forward", "backward", "optimizer"), math.nan)  # and NaN they stay
        self._last_seconds = time.perf_counter()

    def skip(self) -> None:
        """What passed since the last lap belongs to no part."""
        self._last_seconds = time.perf_counter()

    def lap(self, part: str) -> None:
        """What passed since the last lap belongs to `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last_seconds
        self._last_seconds = now

    def expose(self, seconds: float) -> None:
        """The last `seconds` of backward were communication."""
        self.seconds["communication"] += seconds
        self.seconds["backward"] = max(self.seconds["backward"] - seconds, 0.0)  # NaN stays NaN

    def end(self) -> None:
        """The step is over."""
        self._num_seen += 1
        if self._num_seen > WARM_UP_STEPS:
            self.num_steps += 1
            for part in PARTS:
                self.sums[part] += self.seconds[part]

    def means(self) -> list[float]:
        """Mean seconds of each part over the steps that count; NaN before there are any."""
        return [self.sums[part] / self.num_steps if self.num_steps else math.nan for part in PARTS]


def gather_ranks(watch: Stopwatch, hosts: list[str]) -> dict[str, Any]:
    """The content of `ranks.json`: mean seconds of every part on every rank, null where unknown; all must call it."""
    known = [value if math.isfinite(value) else None for value in watch.means()]
    means = gather(known, list[float | None]) if len(hosts) > 1 else [known]
    names = [f"{part}_seconds" for part in PARTS]
    return {
        "num_steps": watch.num_steps,
        "left_out_steps": WARM_UP_STEPS,
        "ranks": [
            {"rank": rank, "host": host, **dict(zip(names, means[rank], strict=True))}
            for rank, host in enumerate(hosts)
        ],
    }


def row_of(
    state: RunState,
    phase_name: str,
    scheduled: dict[str, float],
    step_columns: dict[str, Any],
    evaluation: Evaluation | None,
) -> dict[str, Any]:
    """The row of `metrics.jsonl` for a step that has just been made."""
    row: dict[str, Any] = {
        "step": state.clock.steps,
        "phase": phase_name,
        "samples": state.seen_samples,
        "epoch": state.epoch,
        **scheduled,
        **step_columns,
        "skipped_steps": state.skipped_steps,
        "wall_seconds": state.wall_seconds,
    }
    if evaluation is not None:
        row |= {"val_top1": evaluation.top1, "val_top5": evaluation.top5, "val_loss": evaluation.loss}
    return row


def summary_of(
    state: RunState, config: Config, world_size: int, evaluation: Evaluation | None, stopped_by: str
) -> dict[str, Any]:
    """`summary.json`; `evaluation` is that of `model.safetensors`."""
    return {
        "status": "stopped" if stopped_by else "finished",
        "stopped_by": stopped_by,
        "steps": state.clock.steps,
        "samples": state.seen_samples,
        "epoch": state.epoch,
        "workers": world_size,
        "training_seconds": state.training_seconds,
        "wall_seconds": state.wall_seconds,
        "images_per_second": state.seen_samples / state.training_seconds if state.training_seconds else 0.0,
        "skipped_steps": state.skipped_steps,
        "model": config.model.name,
        "top1": evaluation.top1 if evaluation else None,
        "top5": evaluation.top5 if evaluation else None,
        "val_loss": evaluation.loss if evaluation else None,
        "val_images": evaluation.num_images if evaluation else None,
        "best_top1": state.best_top1 if state.best_top1 >= 0 else None,
        "members": [asdict(member) for member in state.members],
        "trunk_top1": state.trunk_top1 if state.members else None,
    }


def whole_rows(path: Path, last_step: int) -> tuple[int, int]:
    """How many bytes of a metrics file are whole rows up to `last_step`, and the step of the last of them."""
    num_bytes = step = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else []:
        try:
            row_step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            break
        if not line.endswith(b"\n") or row_step > last_step:
            break
        num_bytes, step = num_bytes + len(line), row_step
    return num_bytes, step


class Recorder:
    """Held by the main rank only."""

    def __init__(
        self,
        folder: Path,
        keep_bytes: int,
        steps_done: int,
        config: Config | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._loggers = open_loggers(LogContext(folder, config, steps_done), say)
        self._path = folder / "metrics.jsonl"
        self._log = MetricsLog(self._path, keep_bytes)

    @property
    def num_bytes(self) -> int:
        return self._log.num_bytes

    def reopen(self, keep_bytes: int) -> None:
        """Another rank may have written to the file in between: go on behind its first `keep_bytes`."""
        self._log.close()
        self._log = MetricsLog(self._path, keep_bytes)

    def append(self, row: dict[str, Any]) -> None:
        """Record the row of one step."""
        self._log.append(row)
        for logger in self._loggers:
            logger.row(row)

    def end(self, summary: dict[str, Any]) -> None:
        """The run is finished or stopped; a run that fails never gets here."""
        for logger in self._loggers:
            logger.end(summary)

    def close(self) -> None:
        self._log.close()
        for logger in self._loggers:
            logger.close()


def write_page(folder: Path, say: Callable[[str], None]) -> None:
    """Write `report.html` into the run folder. The run is finished and saved: whatever fails here is only said."""
    try:
        write_report([folder], folder / "report.html")
    except Exception as error:  # a page that cannot be made must not turn a finished run into a failed one
        say(f"the run is complete, but its report was not made ({error}); try: megabatch report {folder}")
