"""Loggers: one small interface, one file each. The main rank holds them; `metrics.jsonl` does not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megabatch.config import Config

__all__ = ["TAGS", "LogContext", "Logger", "open_loggers"]

TAGS = {
    "loss": "train/loss",
    "top1": "train/top1",
    "gradient_norm": "train/gradient_norm",
    "val_top1": "val/top1",
    "val_top5": "val/top5",
    "val_loss": "val/loss",
    "lr": "schedule/lr",
    "momentum": "schedule/momentum",
    "weight_decay": "schedule/weight_decay",
    "global_batch_size": "schedule/global_batch_size",
    "noise_scale": "train/noise_scale",
    "images_per_second": "speed/images_per_second",
    "data_seconds": "speed/data_seconds",
    "compute_seconds": "speed/compute_seconds",
    "communication_seconds": "speed/communication_seconds",
}
"""Column of a row -> the name of its curve, the same in every logger."""


@dataclass(frozen=True)
class LogContext:
    """What a logger may know about its run. `steps_done`: rows after it are written anew by a resumed run."""

    folder: Path
    config: Config | None = None
    steps_done: int = 0


class Logger(Protocol):
    """Takes the rows of a run in order. `end` comes once at most, when the run is finished or stopped."""

    def row(self, row: dict[str, Any]) -> None: ...

    def end(self, summary: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_loggers(context: LogContext, say: Callable[[str], None]) -> list[Logger]:
    """The loggers that `log.to` names; what cannot be opened is a user's error before the first step."""
    from megabatch.train.loggers.board import BoardLogger
    from megabatch.train.loggers.mlflow import MlflowLogger
    from megabatch.train.loggers.mllog import MllogLogger
    from megabatch.train.loggers.wandb import WandbLogger

    kinds: dict[str, Callable[[LogContext], Logger]] = {
        "tensorboard": BoardLogger,
        "wandb": WandbLogger,
        "mlflow": MlflowLogger,
        "mllog": MllogLogger,
    }
    names = context.config.log.to if context.config is not None else ("tensorboard",)
    return [_Guarded(name, kinds[name](context), say) for name in names]


class _Guarded:
    """A logger that fails later (a full disk, a server that is gone) is said once and left out: training goes on."""

    def __init__(self, name: str, logger: Logger, say: Callable[[str], None]) -> None:
        self._name, self._logger, self._say = name, logger, say
        self._works, self._was_said = True, False

    def row(self, row: dict[str, Any]) -> None:
        self._try(lambda: self._logger.row(row))

    def end(self, summary: dict[str, Any]) -> None:
        self._try(lambda: self._logger.end(summary))

    def close(self) -> None:
        self._works = True  # also one that failed gives back what it holds
        self._try(self._logger.close)

    def _try(self, action: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            action()
        except Exception as error:  # whatever it is, the run does not depend on it
            self._works = False
            if self._was_said:
                return
            self._was_said = True
            self._say(f"logging to {self._name} stopped ({error}); training goes on, metrics.jsonl has every row")
