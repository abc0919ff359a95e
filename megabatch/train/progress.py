"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from megabatch.schedule.clock import Clock


class _BarWithText(Bar):
    """The bar on one row, the numbers on the next, so that both fit a narrow terminal."""

    text = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.text, no_wrap=True, overflow="ellipsis")


class Progress:
    """Prints while this rank is the main one; the others call the same methods and stay silent."""

    def __init__(self, is_main: Callable[[], bool], line_every_seconds: float = 5.0) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._is_main = is_main
        self._line_every_seconds = line_every_seconds
        self._bar: _BarWithText | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._began = (0.0, 0)
        self._end_samples = 0

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._is_main():
            self._console.print(line, markup=False)

    @contextmanager
    def showing(self, clock: Clock, end_samples: int) -> Iterator[None]:
        """Show progress from this point of the run to `end_samples`, until the block ends."""
        self._end_samples = end_samples
        self._began = (time.monotonic(), clock.samples)
        if self._is_main() and self._console.is_terminal:
            self._start_bar(clock)
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _start_bar(self, clock: Clock) -> None:
        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        self._bar = _BarWithText(*columns, console=self._console, expand=True)
        epoch = f"{clock.epoch:.2f}"
        self._task = self._bar.add_task("train", total=self._end_samples, completed=clock.samples, epoch=epoch)
        self._bar.start()

    def show(self, clock: Clock, row: dict[str, Any]) -> None:
        """Show the newest step; evaluated ones get a line of their own."""
        if not self._is_main():
            return
        text = self._describe(row)
        if self._bar is not None and self._task is not None:
            self._bar.text = text
            self._bar.update(self._task, completed=clock.samples, epoch=f"{clock.epoch:.2f}")
        if "val_top1" in row:
            self.say(
                f"epoch {clock.epoch:6.2f}  validation top-1 {row['val_top1']:.2%}  top-5 {row['val_top5']:.2%}  "
                f"loss {row['val_loss']:.4f}"
            )
        elif self._bar is None and time.monotonic() - self._last_line >= self._line_every_seconds:
            self._last_line = time.monotonic()
            self.say(f"epoch {clock.epoch:6.2f}/{clock.total_epochs:g}  {text}  eta {self._eta(clock)}")

    def _describe(self, row: dict[str, Any]) -> str:
        """The numbers of a step in at most 80 columns."""
        seconds = row["data_seconds"] + row["compute_seconds"] + row["communication_seconds"] or 1.0
        parts = ("data", "compute", "communication")
        split = "/".join(f"{100 * row[f'{part}_seconds'] / seconds:.0f}" for part in parts)
        return (
            f"loss {row['loss']:.3f} top-1 {row['top1']:.1%} lr {row['lr']:.3g} "
            f"batch {row['global_batch_size']:,} {row['images_per_second']:,.0f} img/s data/comp/comm {split} %"
        )

    def _eta(self, clock: Clock) -> str:
        began, samples = self._began
        if clock.samples <= samples:
            return "-"
        rest = (time.monotonic() - began) * (self._end_samples - clock.samples) / (clock.samples - samples)
        return f"{int(rest) // 60}:{int(rest) % 60:02d}"
