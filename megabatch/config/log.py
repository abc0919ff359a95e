"""Where a run's numbers go besides `metrics.jsonl`, which is always written."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from megabatch.config.section import Section

__all__ = ["LogConfig"]

Target = Literal["tensorboard", "wandb", "mlflow", "mllog"]


class LogConfig(Section):
    """`to` names the loggers. wandb and mlflow are extras: `pip install megabatch[wandb]`, `megabatch[mlflow]`.

    mllog writes MLPerf-style `:::MLLOG` lines to `mllog.log` in the run folder.
    """

    to: tuple[Target, ...] = ("tensorboard",)
    project: str = "megabatch"  # the project (wandb) or experiment (mlflow) runs are filed under
    wandb_mode: Literal["offline", "online"] = "offline"  # offline: in the run folder, `wandb sync` sends it later
    mlflow_uri: str = ""  # empty: a file store in the folder `mlruns` of the run folder

    @field_validator("to")
    @classmethod
    def _each_once(cls, value: tuple[Target, ...]) -> tuple[Target, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"log.to names a logger twice, given {list(value)}; name each once")
        return value
