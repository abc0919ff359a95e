"""Rows and checkpoints of a run, written by whichever rank is the main one now.

The other ranks keep the newest rows: when the main rank is lost, the next one writes those that are missing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from megabatch.files import lock
from megabatch.report.metrics_log import MetricsLog
from megabatch.report.run import METRICS_FILE
from megabatch.train.branch import copied
from megabatch.train.checkpoint import CheckpointWriter, save_checkpoint
from megabatch.train.components import Components
from megabatch.train.loggers import LogContext, Logger, open_loggers
from megabatch.train.run_dir import LOCK_SECONDS
from megabatch.train.state import RunState, whole_state

_CACHED_ROWS = 64


class RunWriter:
    """Writes on the main rank, after `open` or `take_over`; leaving it waits until all checkpoints are on disk."""

    def __init__(self, folder: Path, components: Components, state: RunState, say: Callable[[str], None]) -> None:
        self._folder, self._components, self._state, self._say = folder, components, state, say
        self._path = folder / METRICS_FILE
        self._log: MetricsLog | None = None
        self._loggers: list[Logger] = []
        self._checkpoints = CheckpointWriter()
        self._rows: deque[dict[str, Any]] = deque(maxlen=_CACHED_ROWS)

    def __enter__(self) -> Self:
        self._checkpoints.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._checkpoints.__exit__(*error)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The newest rows, for the next main rank."""
        return list(self._rows)

    def replace_rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Another rank's rows are as new or newer."""
        self._rows.clear()
        self._rows.extend(rows)

    def open(self, stack: ExitStack, keep_bytes: int) -> None:
        """Write from now on, until the stack ends; the first `keep_bytes` of the metrics stay."""
        context = LogContext(self._folder, self._components.config, self._state.clock.steps)
        self._loggers = open_loggers(context, self._say)
        self._log = MetricsLog(self._path, keep_bytes)
        stack.callback(self.hand_over)

    def append(self, row: dict[str, Any]) -> None:
        """Note the row of a step, on every rank; raises what went wrong with checkpoints since the last one."""
        self._rows.append(row)
        self._record(row)
        self._checkpoints.check()

    def save(self) -> None:
        """Begin to write a checkpoint, on the main rank; without talking to the others."""
        if self._log is not None:
            self._save(self._log.num_bytes, is_best=self._state.best_step == self._state.clock.steps)

    def take_over(self, stack: ExitStack) -> None:
        """As the main rank of a new world: write down what the one before did not, and a checkpoint.

        The one before may be this rank itself. It cannot know: it may have hung, while another led and wrote.
        """
        keep_bytes, last_step = whole_rows(self._path, self._state.clock.steps)
        if self._log is None:
            stack.enter_context(lock(self._folder / ".lock", 0.0))  # a main rank that hangs may still hold it
            self.open(stack, keep_bytes)
        else:
            self._log.close()
            self._log = MetricsLog(self._path, keep_bytes)
        for row in self._rows:
            if row["step"] > last_step:
                self._record(row)
        self.save()

    def hand_over(self) -> None:
        """Another rank is the main one now, and writes."""
        self._checkpoints.forget()
        if self._log is not None:
            self._log.close()
            self._log = None
        for logger in self._loggers:
            logger.close()
        self._loggers = []

    def save_last(self, stack: ExitStack) -> None:
        """Leave rows and a checkpoint behind. The main rank may be gone: then whoever is left does, one by one."""
        if self._log is not None:
            self.save()
        else:
            stack.enter_context(lock(self._folder / ".lock", LOCK_SECONDS))  # a main rank that hangs may hold it
            steps = self._state.clock.steps
            keep_bytes, last_step = whole_rows(self._path, steps)
            if last_step < steps:
                self.take_over(stack)
            else:  # rows of later steps, which another may have left with its checkpoint, stay
                self._save(keep_bytes, is_best=False)
        self.flush()

    def flush(self) -> None:
        """Wait until every checkpoint is on disk."""
        self._checkpoints.flush()

    def end(self, summary: dict[str, Any]) -> None:
        """The run is finished or stopped; a run that fails never gets here."""
        for logger in self._loggers:
            logger.end(summary)

    def _record(self, row: dict[str, Any]) -> None:
        """Write a row, where this rank is the one that writes."""
        if self._log is not None:
            self._log.append(row)
        for logger in self._loggers:
            logger.row(row)

    def _save(self, metrics_bytes: int, *, is_best: bool) -> None:
        """Copy the state as it is now; the checkpoint is made of it in the background."""
        saved = copied(whole_state(self._components, self._state) | {"metrics_bytes": metrics_bytes})
        steps, keep = self._state.clock.steps, self._components.config.checkpoint.keep
        write = partial(save_checkpoint, self._folder / "checkpoints", saved, steps, keep, best=is_best)
        self._checkpoints.submit(write, best=is_best)


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
