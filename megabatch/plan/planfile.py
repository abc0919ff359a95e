"""The plan as a file: what `megabatch plan --output plan.json` writes and `megabatch train --plan plan.json`
follows.

`settings` are overrides of the recipe, `grid` and `workers` what the run is started with; `prediction` is what the
run is compared with afterwards (`plan.loop`). A plan is for one recipe: another one refuses it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import ConfigError
from megabatch.plan.interval import Interval
from megabatch.plan.planner import Help, PlanResult
from megabatch.plan.predict import Prediction
from megabatch.plan.workload import Workload

__all__ = ["PlannedRun", "follow", "plan_as_data", "prediction_as_data", "read_plan"]

FORMAT = 1
_MOST_LOCAL_WORKERS = 64


@dataclass(frozen=True)
class PlannedRun:
    """What a run takes from a plan file; `text` is the file itself, kept with the run."""

    recipe: str
    workers: int | None
    grid: str | None
    overrides: tuple[str, ...]
    prediction: dict[str, Any]
    text: str


def plan_as_data(result: PlanResult, cluster: str, workload: Workload, stages_text: str) -> dict[str, Any]:
    """Everything of a plan, as plain data: also what `--json` prints."""
    chosen = result.chosen
    bucket = chosen.candidate.bucket_mb
    settings: dict[str, Any] = {
        "comm.algorithm": chosen.candidate.algorithm,
        "comm.bucket_mb": bucket if math.isfinite(bucket) else _whole_gradient_mb(workload),
        "train.batch_total": int(stages_text) if stages_text.isdigit() else stages_text,
        "train.ghost_batch": int(min(workload.ghost_batch, chosen.local_batch)),
    }
    return {
        "megabatch_plan": FORMAT,
        "recipe": workload.name,
        "cluster": cluster,
        "goal": result.reason,
        "workers": chosen.candidate.workers,
        "grid": chosen.candidate.grid.text,
        "settings": settings,
        "prediction": prediction_as_data(chosen),
        "candidates": [prediction_as_data(one) for one in result.candidates],
        "front": [result.candidates.index(one) for one in result.front],
        "num_considered": result.num_considered,
        "would_help": [_help(one) for one in result.helps],
    }


def prediction_as_data(one: Prediction) -> dict[str, Any]:
    """One prediction; seconds, and 80 % intervals as low and high."""
    bucket = one.candidate.bucket_mb
    return {
        "workers": one.candidate.workers,
        "algorithm": one.candidate.algorithm,
        "grid": one.candidate.grid.text,
        "bucket_mb": bucket if math.isfinite(bucket) else "all",
        "batch": one.batch,
        "local_batch": one.local_batch,
        "step_seconds": _interval(one.step),
        "step_parts_seconds": dict(one.step_parts),
        "compute_seconds": _part(one, "compute"),
        "communication_and_waiting_seconds": _part(one, "exposed communication", "stragglers"),
        "data_seconds": _part(one, "loader"),
        "hidden_and_exposed_communication_seconds": one.communication_seconds,
        "images_per_second": _interval(one.images_per_second),
        "efficiency": one.efficiency,
        "epochs": _interval(one.epochs),
        "updates": one.updates,
        "time_parts_seconds": dict(one.time_parts),
        "training_seconds": _interval(one.training),
        "total_seconds": _interval(one.total),
        "node_hours": _interval(one.node_hours),
        "cost": _interval(one.cost) if one.cost else None,
        "currency": one.currency,
        "binding": one.binding,
        "warnings": list(one.warnings),
    }


def read_plan(path: str | Path) -> PlannedRun:
    """Read a plan file.

    Raises:
        ConfigError: not such a file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan '{path}' cannot be read ({error}); give a file of `megabatch plan --output`") from None
    if not isinstance(content, dict) or content.get("megabatch_plan") != FORMAT:
        raise ConfigError(f"'{path}' is no plan of this version; write one with `megabatch plan --output plan.json`")
    try:
        settings = content["settings"]
        overrides = tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
        return PlannedRun(
            str(content["recipe"]),
            int(content["workers"]),
            str(content["grid"]),
            overrides,
            dict(content["prediction"]),
            text,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"plan '{path}' is damaged ({error}); write it anew with `megabatch plan --output`") from None


def follow(path: Path, recipe: str, grid: str | None, workers: int | None, environ: Mapping[str, str]) -> PlannedRun:
    """A plan for a run of `recipe`; a grid or workers that were typed win over it.

    Under a launcher the workers are those it started. Without one, local workers are started, and a plan for a cluster
    is refused: nobody wants its thousands of workers on one machine.

    Raises:
        ConfigError: the plan is for another recipe, or needs a cluster and this is none.
    """
    planned = read_plan(path)
    if planned.recipe != Path(recipe).stem:
        raise ConfigError(
            f"plan '{path}' is for recipe '{planned.recipe}', '{recipe}' was given; plan that one, or train the other"
        )
    assert planned.workers is not None
    launched = any(name in environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"))
    if not launched and workers is None and planned.workers > _MOST_LOCAL_WORKERS:
        raise ConfigError(
            f"plan '{path}' is for {planned.workers:,} workers and no launcher has started them; "
            "put srun, torchrun or mpirun before the command"
        )
    wanted = workers or (None if launched else planned.workers)
    fits = wanted is None or wanted == planned.workers
    return dataclasses.replace(planned, workers=wanted, grid=grid or (planned.grid if fits else None))


def _interval(value: Interval) -> dict[str, float]:
    return {"middle": value.middle, "low": value.low, "high": value.high}


def _part(one: Prediction, *names: str) -> dict[str, float]:
    """Parts of an update, as uncertain as the whole of it."""
    seconds = sum(one.step_parts[name] for name in names)
    return _interval(one.step.times(seconds / one.step.middle))


def _help(one: Help) -> dict[str, Any]:
    return {"what": one.what, "gain": one.gain}


def _whole_gradient_mb(workload: Workload) -> float:
    """A bucket that holds everything, in whole MB."""
    return float(math.ceil(workload.gradient_bytes / 2**20) + 1)
