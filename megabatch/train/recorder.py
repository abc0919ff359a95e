"""Writes what a run measures: rows to `metrics.jsonl`, the same numbers to the loggers that `log.to` names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megabatch.config import Config
from megabatch.report.run import MetricsLog
from megabatch.train.loggers import LogContext, open_loggers

__all__ = ["Recorder"]


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
