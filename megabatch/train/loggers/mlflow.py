"""MLflow, by default to a file store in the run folder: `mlflow ui --backend-store-uri RUN/mlruns` shows it."""

from __future__ import annotations

import math
import os
from typing import Any

from megabatch.errors import ConfigError
from megabatch.files import flatten, write_atomically
from megabatch.train.loggers import TAGS, LogContext

__all__ = ["MlflowLogger"]


class MlflowLogger:
    """One MLflow run per run folder; `mlflow-id` holds its id for resuming."""

    def __init__(self, context: LogContext) -> None:
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise ConfigError("log.to names mlflow, which is not installed; pip install megabatch[mlflow]") from None
        assert context.config is not None
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
