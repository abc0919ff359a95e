"""TensorBoard: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

import warnings
from typing import Any

from megabatch.train.loggers import TAGS, LogContext

__all__ = ["BoardLogger"]


class BoardLogger:
    """The default logger."""

    def __init__(self, context: LogContext) -> None:
        with warnings.catch_warnings():
            # TensorBoard's own dependencies announce deprecations that a user of megabatch can do nothing about.
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides rows that a killed run wrote after the checkpoint this run continues from.
            self._board = SummaryWriter(str(context.folder / "tensorboard"), purge_step=context.steps_done + 1)

    def row(self, row: dict[str, Any]) -> None:
        for name, tag in TAGS.items():
            if name in row:
                self._board.add_scalar(tag, row[name], global_step=int(row["step"]))

    def end(self, summary: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._board.close()
