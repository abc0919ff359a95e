"""What a run measures: seconds per part of a step, the row of a step, the summary, and where they are written.

Parts are data (waiting for images), forward, backward (without what follows), communication (gradients that nothing
hides any more) and optimizer. They are read from the host's clock, so on CUDA, where the host runs ahead of the
device, forward, backward and optimizer are not known and stay NaN.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megabatch.config import Config
from megabatch.report.page import write_report
from megabatch.report.run import MetricsLog
from megabatch.schedule.noise import NoiseSample
from megabatch.train.evaluate import Evaluation
from megabatch.train.loggers import LogContext, open_loggers
from megabatch.train.state import RunState

__all__ = [
    "PARTS",
    "Recorder",
    "StepResult",
    "Stopwatch",
    "gather_ranks",
    "ranks_table",
    "row_of",
    "summary_of",
    "write_page",
]

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
        self.seconds["backward"] = max(0.0, self.seconds["backward"] - seconds)

    def end(self) -> None:
        """The step is over."""
        if not self._host_clock_tells:
            for part in ("forward", "backward", "optimizer"):
                self.seconds[part] = math.nan
        self._num_seen += 1
        if self._num_seen > WARM_UP_STEPS:
            self.num_steps += 1
            for part in PARTS:
                self.sums[part] += self.seconds[part]

    def means(self) -> list[float]:
        """Mean seconds of each part over the steps that count; NaN before there are any."""
        return [self.sums[part] / self.num_steps if self.num_steps else math.nan for part in PARTS]


def ranks_table(means: list[list[float]], hosts: list[str], num_steps: int) -> dict[str, Any]:
    """The content of `ranks.json`: mean seconds of every part on every rank; unknown ones are null."""
    return {
        "num_steps": num_steps,
        "left_out_steps": WARM_UP_STEPS,
        "ranks": [
            {"rank": rank, "host": host}
            | {
                f"{part}_seconds": value if math.isfinite(value) else None
                for part, value in zip(PARTS, row, strict=True)
            }
            for rank, (host, row) in enumerate(zip(hosts, means, strict=True))
        ],
    }


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank. Seconds are means over ranks, except the step's own."""

    num_samples: int
    loss: float
    top1: float
    gradient_norm: float
    applied: bool  # False when the gradient was not finite and the optimizer left the weights alone
    stop_wanted: bool  # some rank was asked to stop
    noise: NoiseSample | None  # smoothed noise and signal of the gradient, when this step was measured
    noise_scale: float | None  # smoothed, in images; None when it is not measured, or not known
    data_seconds: float
    communication_seconds: float
    step_seconds: float
    forward_seconds: float = math.nan  # NaN where the host's clock does not tell
    backward_seconds: float = math.nan
    optimizer_seconds: float = math.nan  # this rank's own: every rank does the same

    @property
    def compute_seconds(self) -> float:
        return max(0.0, self.step_seconds - self.data_seconds - self.communication_seconds)


def row_of(
    run: RunState, phase_name: str, scheduled: dict[str, float], result: StepResult, evaluation: Evaluation | None
) -> dict[str, Any]:
    """The row of `metrics.jsonl` for a step that has just been made."""
    row: dict[str, Any] = {
        "step": run.clock.steps,
        "phase": phase_name,
        "samples": run.seen_samples,
        "epoch": run.epoch,
        "loss": result.loss,
        "top1": result.top1,
        **scheduled,
        "global_batch_size": result.num_samples,
        "images_per_second": result.num_samples / result.step_seconds,
        "gradient_norm": result.gradient_norm,
        "applied": int(result.applied),
        "skipped_steps": run.skipped_steps,
        "wall_seconds": run.wall_seconds,
        "step_seconds": result.step_seconds,
        "data_seconds": result.data_seconds,
        "compute_seconds": result.compute_seconds,
        "communication_seconds": result.communication_seconds,
        "forward_seconds": result.forward_seconds,
        "backward_seconds": result.backward_seconds,
        "optimizer_seconds": result.optimizer_seconds,
    }
    if result.noise_scale is not None:
        row["noise_scale"] = result.noise_scale
    if evaluation is not None:
        row |= {"val_top1": evaluation.top1, "val_top5": evaluation.top5, "val_loss": evaluation.loss}
    return row


def summary_of(
    run: RunState, config: Config, world_size: int, evaluation: Evaluation | None, stopped_by: str
) -> dict[str, Any]:
    """`summary.json`; `evaluation` is that of `model.safetensors`."""
    return {
        "status": "stopped" if stopped_by else "finished",
        "stopped_by": stopped_by,
        "steps": run.clock.steps,
        "samples": run.seen_samples,
        "epoch": run.epoch,
        "workers": world_size,
        "training_seconds": run.training_seconds,
        "wall_seconds": run.wall_seconds,
        "images_per_second": run.seen_samples / run.training_seconds if run.training_seconds else 0.0,
        "skipped_steps": run.skipped_steps,
        "model": config.model.name,
        "top1": evaluation.top1 if evaluation else None,
        "top5": evaluation.top5 if evaluation else None,
        "val_loss": evaluation.loss if evaluation else None,
        "val_images": evaluation.num_images if evaluation else None,
        "best_top1": run.best_top1 if run.best_top1 >= 0 else None,
        "members": run.members,
        "trunk_top1": run.trunk_top1 if run.members else None,
    }


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
        self._log = MetricsLog(folder / "metrics.jsonl", keep_bytes)

    @property
    def num_bytes(self) -> int:
        return self._log.num_bytes

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


def gather_ranks(watch: Stopwatch, hosts: list[str]) -> dict[str, Any]:
    """Mean seconds per part of a step on every rank; all ranks must call it."""
    means: list[list[float]] = [[] for _ in hosts]
    dist.all_gather_object(means, watch.means())
    return ranks_table(means, hosts, watch.num_steps)


def write_page(folder: Path, say: Callable[[str], None]) -> None:
    """Write `report.html` into the run folder. The run is finished and saved: whatever fails here is only said."""
    try:
        write_report([folder], folder / "report.html")
    except Exception as error:  # a page that cannot be made must not turn a finished run into a failed one
        say(f"the run is complete, but its report was not made ({error}); try: megabatch report {folder}")
