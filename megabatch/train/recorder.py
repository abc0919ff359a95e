"""Writes what a run measures: rows to `metrics.jsonl`, the same numbers to TensorBoard."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from megabatch.report.record import MetricsLog

__all__ = ["Recorder"]

_GROUPS = {
    "loss": "train/loss",
    "top1": "train/top1",
    "gradient_norm": "train/gradient_norm",
    "val_top1": "val/top1",
    "val_top5": "val/top5",
    "val_loss": "val/loss",
    "learning_rate": "schedule/learning_rate",
    "momentum": "schedule/momentum",
    "weight_decay": "schedule/weight_decay",
    "batch_total": "schedule/batch_total",
    "noise_scale": "train/noise_scale",
    "images_per_second": "speed/images_per_second",
    "data_seconds": "speed/data_seconds",
    "compute_seconds": "speed/compute_seconds",
    "communication_seconds": "speed/communication_seconds",
}


class Recorder:
    """Held by the first worker only."""

    def __init__(self, folder: Path, keep_bytes: int, updates_done: int) -> None:
        with warnings.catch_warnings():
            # TensorBoard's own dependencies announce deprecations that a user of megabatch can do nothing about.
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides rows that a killed run wrote after the checkpoint this run continues from.
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=updates_done + 1)
        self._log = MetricsLog(folder / "metrics.jsonl", keep_bytes)

    @property
    def num_bytes(self) -> int:
        return self._log.num_bytes

    def append(self, row: dict[str, Any]) -> None:
        """Record the row of one update."""
        self._log.append(row)
        for name, tag in _GROUPS.items():
            if name in row:
                self._board.add_scalar(tag, row[name], global_step=int(row["update"]))

    def close(self) -> None:
        self._log.close()
        self._board.close()
