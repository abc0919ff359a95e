"""MLPerf-style lines, one JSON event after `:::MLLOG` each, in `mllog.log` of the run folder.

The keys are those of MLPerf Training's image classification rules (mlcommons/logging, `mllog/constants.py`):
submission and run start and stop, batch size, optimizer, `eval_accuracy` and `epoch_num`. A line says what a run did;
it does not make the run a submission.
"""

from __future__ import annotations

import json
import time
from typing import Any

from megabatch.train.loggers import LogContext

__all__ = ["MllogLogger"]


class MllogLogger:
    """Appends; a resumed run goes on in the same file with another `run_start`."""

    def __init__(self, context: LogContext) -> None:
        self._file = open(context.folder / "mllog.log", "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        config = context.config
        if config is not None:
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
