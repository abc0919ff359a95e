"""Weights & Biases, offline (a folder `wandb sync` sends later) or online. The run's id is kept for resuming."""

from __future__ import annotations

import uuid
from typing import Any

from megabatch.errors import ConfigError
from megabatch.files import write_atomically
from megabatch.train.loggers import TAGS, LogContext

__all__ = ["WandbLogger"]


class WandbLogger:
    """Files in `wandb/` of the run folder; `wandb-id` beside them holds the id."""

    def __init__(self, context: LogContext) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("log.to names wandb, which is not installed; pip install megabatch[wandb]") from None
        assert context.config is not None
        settings = context.config.log
        id_file = context.folder / "wandb-id"
        if not id_file.is_file():
            write_atomically(id_file, uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=settings.project,
            name=context.folder.name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow" if context.steps_done else None,
            mode=settings.wandb_mode,
            dir=str(context.folder),
            config=context.config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def row(self, row: dict[str, Any]) -> None:
        self._run.log({tag: row[name] for name, tag in TAGS.items() if name in row}, step=int(row["step"]))

    def end(self, summary: dict[str, Any]) -> None:
        for name, value in summary.items():
            if isinstance(value, int | float | str):
                self._run.summary[name] = value

    def close(self) -> None:
        self._run.finish()
