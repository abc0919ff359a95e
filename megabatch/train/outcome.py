"""What a run tells: the row of a step, and the summary at the end."""

from __future__ import annotations

from typing import Any

from megabatch.config import Config
from megabatch.schedule.batch import Step
from megabatch.train.evaluate import Evaluation
from megabatch.train.snapshot import RunState
from megabatch.train.step import StepResult

__all__ = ["row_of", "summary_of"]


def row_of(
    run: RunState,
    phase_name: str,
    step: Step,
    rates: dict[str, float],
    result: StepResult,
    evaluation: Evaluation | None,
) -> dict[str, Any]:
    """The row of `metrics.jsonl` for a step that has just been made."""
    row: dict[str, Any] = {
        "step": run.clock.steps,
        "phase": phase_name,
        "samples": run.seen_samples,
        "epoch": run.epoch,
        "loss": result.loss,
        "top1": result.top1,
        **rates,
        "global_batch_size": step.num_samples,
        "images_per_second": step.num_samples / result.step_seconds,
        "gradient_norm": result.gradient_norm,
        "applied": int(result.applied),
        "skipped_steps": run.skipped_steps,
        "wall_seconds": run.wall_seconds,
        "step_seconds": result.step_seconds,
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
    run: RunState, config: Config, world_size: int, evaluation: Evaluation | None, stopped_by: str
) -> dict[str, Any]:
    """`summary.json`; `evaluation` is that of `model.safetensors`."""
    return {
        "status": "stopped" if stopped_by else "finished",
        "stopped_by": stopped_by,
        "steps": run.clock.steps,
        "samples": run.seen_samples,
        "epoch": run.epoch,
        "workers": world_size,
        "training_seconds": run.training_seconds,
        "wall_seconds": run.wall_seconds,
        "images_per_second": run.seen_samples / run.training_seconds if run.training_seconds else 0.0,
        "skipped_steps": run.skipped_steps,
        "model": config.model.name,
        "top1": evaluation.top1 if evaluation else None,
        "top5": evaluation.top5 if evaluation else None,
        "val_loss": evaluation.loss if evaluation else None,
        "val_images": evaluation.num_images if evaluation else None,
        "best_top1": run.best_top1 if run.best_top1 >= 0 else None,
        "members": run.members,
        "trunk_top1": run.trunk_top1 if run.members else None,
    }
