"""What a run measures: seconds per part of a step, the row of a step, the summary, the page.

Parts are data (waiting for images), forward, backward (without what follows), communication (gradients that nothing
hides any more) and optimizer. They are read from the host's clock, so on CUDA, where the host runs ahead of the
device, forward, backward and optimizer are not known and stay NaN; communication is the main rank's own, by the
device's clock, and a step's seconds are those between its end and the end of the one before.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megabatch.comm.messages import gather
from megabatch.config import Config
from megabatch.report.page import write_report
from megabatch.report.run import PAGE_FILE
from megabatch.train.evaluate import Evaluation
from megabatch.train.state import RunState

PARTS = ("data", "forward", "backward", "communication", "optimizer")

# The first steps pay for memory, caches and connections, and would make every rank look like a straggler.
WARM_UP_STEPS = 3


class Stopwatch:
    """Laps of one step at a time; `sums` grow over the steps that count."""

    def __init__(self, host_clock_tells: bool) -> None:
        self._host_clock_tells = host_clock_tells
        self._last_seconds = self._last_read = 0.0
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

    def expose_late(self, seconds: float, counts: bool) -> None:
        """So much of an earlier step was communication, as the device tells later. counts: what its `end` returned."""
        if counts:
            self.sums["communication"] += seconds

    def end(self) -> bool:
        """The step is over; whether it counts."""
        self._num_seen += 1
        counts = self._num_seen > WARM_UP_STEPS
        if counts:
            self.num_steps += 1
            for part in PARTS:
                self.sums[part] += self.seconds[part]
        return counts

    def whole_step(self, begin: float) -> float:
        """Seconds of a step that began at `begin` and whose numbers have just been read.

        On an accelerator a step begins before the one before is read: seconds belong to one of them.
        """
        now = time.perf_counter()
        seconds, self._last_read = now - max(begin, self._last_read), now
        return seconds

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


def write_page(folder: Path, say: Callable[[str], None]) -> None:
    """Write `report.html` into the run folder. The run is finished and saved: whatever fails here is only said."""
    try:
        write_report([folder], folder / PAGE_FILE)
    except Exception as error:  # a page that cannot be made must not turn a finished run into a failed one
        say(f"the run is complete, but its report was not made ({error}); try: megabatch report {folder}")


def say_result(summary: dict[str, Any], folder: Path) -> None:
    """Print how the run ended, and what to do next."""
    if summary["status"] == "stopped":
        print(f"stopped by {summary['stopped_by']} after step {summary['steps']}, checkpoint written")
        print(f"go on with     megabatch train --resume {shlex.quote(str(folder))}")
        return
    hits = f"top-1 {summary['top1']:.2%}, top-5 {summary['top5']:.2%}"
    print(f"accuracy       {hits} of {summary['val_images']:,} images")
    print(
        f"time           {summary['training_seconds']:.1f} s of training, {summary['steps']:,} steps, "
        f"{summary['images_per_second']:,.0f} images/s on {summary['workers']} workers"
    )
    if unreadable := _unreadable_line(folder):
        print(unreadable)
    print(f"run folder     {folder}")
    if (folder / PAGE_FILE).is_file():
        print(f"report         {folder / PAGE_FILE}")
    run = shlex.quote(str(folder))
    print(f"next           megabatch evaluate {run}  (adds the confusion matrix and the mistakes to the report)")
    print(f"               megabatch predict {run} IMAGES...")


def _unreadable_line(folder: Path) -> str:
    """How many images could not be read, and where they are listed; empty when all could."""
    lists = sorted(folder.glob("broken.*.jsonl"))  # one of each worker that met some
    images: set[tuple[str, int]] = set()
    for path in lists:
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                one = json.loads(line)
                images.add((str(one["set"]), int(one["index"])))
    if not images:
        return ""
    where = str(lists[0]) if len(lists) == 1 else f"{folder / 'broken.*.jsonl'}"
    verb = "image was" if len(images) == 1 else "images were"
    return f"unreadable     {len(images):,} {verb} replaced or shown as grey; listed with the reasons in {where}"
