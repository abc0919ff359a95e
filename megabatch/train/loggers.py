"""Loggers: one small interface, and TensorBoard, MLPerf-style lines, MLflow and Weights & Biases behind it.

The main rank holds them; `metrics.jsonl` does not depend on them.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megabatch.config import Config
from megabatch.errors import ConfigError
from megabatch.files import flatten, write_atomically

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
    config: Config
    steps_done: int = 0


class Logger(Protocol):
    """Takes the rows of a run in order. `end` comes once at most, when the run is finished or stopped."""

    def row(self, row: dict[str, Any]) -> None: ...

    def end(self, summary: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_loggers(context: LogContext, say: Callable[[str], None]) -> list[Logger]:
    """The loggers that `log.to` names; what cannot be opened is a user's error before the first step."""
    kinds: dict[str, Callable[[LogContext], Logger]] = {
        "tensorboard": BoardLogger,
        "wandb": WandbLogger,
        "mlflow": MlflowLogger,
        "mllog": MllogLogger,
    }
    return [_Guarded(name, kinds[name](context), say) for name in context.config.log.to]


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


class MllogLogger:
    """Appends; a resumed run goes on in the same file with another `run_start`."""

    def __init__(self, context: LogContext) -> None:
        self._file = open(context.folder / "mllog.log", "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        config = context.config
        self._event("POINT_IN_TIME", "submission_benchmark", "resnet" if "resnet" in config.model.name else "other")
        self._event("POINT_IN_TIME", "global_batch_size", config.train.global_batch_size)
        self._event("POINT_IN_TIME", "opt_name", config.optimizer.name)
        self._event("POINT_IN_TIME", "seed", config.train.seed)
        self._event("INTERVAL_START", "run_start", None, {"resumed_after_step": context.steps_done})

    def row(self, row: dict[str, Any]) -> None:
        if "val_top1" in row:
            place = {"epoch_num": row["epoch"], "samples_count": row.get("samples")}
            self._event("POINT_IN_TIME", "eval_accuracy", row["val_top1"], place)

    def end(self, summary: dict[str, Any]) -> None:
        status = "success" if summary.get("status") == "finished" else "aborted"
        self._event("POINT_IN_TIME", "train_samples", summary.get("samples"))
        self._event("INTERVAL_END", "run_stop", None, {"status": status, "epoch_num": summary.get("epoch")})

    def close(self) -> None:
        self._file.close()

    def _event(self, kind: str, key: str, value: Any, metadata: dict[str, Any] | None = None) -> None:
        event = {
            "namespace": "",
            "time_ms": int(time.time() * 1000),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": metadata or {},
        }
        self._file.write(f":::MLLOG {json.dumps(event)}\n")
        self._file.flush()


class MlflowLogger:
    """One MLflow run per run folder; `mlflow-id` holds its id for resuming."""

    def __init__(self, context: LogContext) -> None:
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigError("log.to names mlflow, which is not installed; pip install megabatch[mlflow]") from None
        settings = context.config.log
        # Newer versions ask that a file store be wanted by name.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._metric = Metric
        self._client = MlflowClient(settings.mlflow_uri or (context.folder.absolute() / "mlruns").as_uri())
        id_file = context.folder / "mlflow-id"
        if context.steps_done and id_file.is_file():
            self._id = id_file.read_text(encoding="utf-8").strip()
            return
        found = self._client.get_experiment_by_name(settings.project)
        experiment = found.experiment_id if found else self._client.create_experiment(settings.project)
        self._id = self._client.create_run(experiment, run_name=context.folder.name).info.run_id
        write_atomically(id_file, self._id)
        flat = flatten(context.config.model_dump(mode="json"))
        self._client.log_batch(self._id, params=[Param(name, str(value)[:500]) for name, value in flat][:100])

    def row(self, row: dict[str, Any]) -> None:
        step, stamp = int(row["step"]), int(1000 * float(row.get("wall_seconds", 0.0)))
        values = {tag: float(row[name]) for name, tag in TAGS.items() if name in row}
        metrics = [self._metric(tag, value, stamp, step) for tag, value in values.items() if math.isfinite(value)]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, summary: dict[str, Any]) -> None:
        for name in ("top1", "top5", "training_seconds"):
            if isinstance(summary.get(name), float):
                self._client.log_metric(self._id, f"summary/{name}", summary[name])
        status = "FINISHED" if summary.get("status") == "finished" else "KILLED"
        self._client.set_terminated(self._id, status)

    def close(self) -> None:
        """Every call has already written."""


class WandbLogger:
    """Files in `wandb/` of the run folder; `wandb-id` beside them holds the id."""

    def __init__(self, context: LogContext) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("log.to names wandb, which is not installed; pip install megabatch[wandb]") from None
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
