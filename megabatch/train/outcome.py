"""What a run tells: the row of an update, and the summary at the end."""

from __future__ import annotations

from typing import Any

from megabatch.config import Config
from megabatch.schedule.batch import Update
from megabatch.train.evaluate import Evaluation
from megabatch.train.snapshot import RunState
from megabatch.train.step import UpdateResult

__all__ = ["row_of", "summary_of"]


def row_of(
    run: RunState,
    phase_name: str,
    update: Update,
    rates: dict[str, float],
    result: UpdateResult,
    evaluation: Evaluation | None,
) -> dict[str, Any]:
    """The row of `metrics.jsonl` for an update that has just been made."""
    row: dict[str, Any] = {
        "update": run.clock.updates,
        "phase": phase_name,
        "samples": run.seen_samples,
        "epoch": run.epoch,
        "loss": result.loss,
        "top1": result.top1,
        **rates,
        "batch_total": update.num_samples,
        "images_per_second": update.num_samples / result.update_seconds,
        "gradient_norm": result.gradient_norm,
        "applied": int(result.applied),
        "skipped_updates": run.skipped_updates,
        "wall_seconds": run.wall_seconds,
        "update_seconds": result.update_seconds,
        "data_seconds": result.data_seconds,
        "compute_seconds": result.compute_seconds,
        "communication_seconds": result.communication_seconds,
        "forward_seconds": result.forward_seconds,
        "backward_seconds": result.backward_seconds,
        "optimizer_seconds": result.optimizer_seconds,
    }
    if result.noise_scale is not None:
        row["noise_scale"] = result.noise_scale
    if evaluation is not None:
        row |= {"val_top1": evaluation.top1, "val_top5": evaluation.top5, "val_loss": evaluation.loss}
    return row


def summary_of(
    run: RunState, config: Config, num_workers: int, evaluation: Evaluation | None, stopped_by: str
) -> dict[str, Any]:
    """`summary.json`; `evaluation` is that of `model.safetensors`."""
    return {
        "status": "stopped" if stopped_by else "finished",
        "stopped_by": stopped_by,
        "updates": run.clock.updates,
        "samples": run.seen_samples,
        "epoch": run.epoch,
        "workers": num_workers,
        "training_seconds": run.training_seconds,
        "wall_seconds": run.wall_seconds,
        "images_per_second": run.seen_samples / run.training_seconds if run.training_seconds else 0.0,
        "skipped_updates": run.skipped_updates,
        "model": config.model.name,
        "top1": evaluation.top1 if evaluation else None,
        "top5": evaluation.top5 if evaluation else None,
        "val_loss": evaluation.loss if evaluation else None,
        "val_pictures": evaluation.num_pictures if evaluation else None,
        "best_top1": run.best_top1 if run.best_top1 >= 0 else None,
        "members": run.members,
        "trunk_top1": run.trunk_top1 if run.members else None,
    }
