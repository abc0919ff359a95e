"""Plans as files: what `megabatch plan --output plan.json` writes and `train` follows.

A plan carries all that was priced, so that the run is the one that was predicted: `scale` and `epochs` fit the recipe
as the options of the same names do, `overrides` are those the user typed, `settings` what the planner chose, in this
order; `grid` and `workers` are what the run is started with. `prediction` is what the run is compared with afterwards
(`report.plan_compare`). A plan is for one recipe at one scale: another one refuses it. What is typed after
`megabatch train` wins over the plan.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megabatch.errors import ConfigError, MegabatchError, complaint
from megabatch.files import parse_json, read_text, write_atomically
from megabatch.plan.estimate import Estimate
from megabatch.plan.quantity import Interval
from megabatch.plan.search import PlanResult
from megabatch.recipes import load_config
from megabatch.schedule.batch import parse_stages

_FORMAT = 1
_MOST_LOCAL_WORKERS = 64
_OF_LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
_BATCH = "train.global_batch_size"


class PlannedStages(BaseModel):
    """A global batch, and the epochs of the run that it is written for."""

    global_batch_size: int | str
    epochs: float


class PlannedRun(BaseModel):
    """What a run takes from a plan file; `text` is the file itself, which stays with the run.

    overrides: those of the user, then the planner's `settings`, so that the planner's win.
    scale, epochs: None where the recipe is taken as it is.
    """

    recipe: str
    workers: int | None
    grid: str | None
    scale: str | None
    epochs: float | None
    overrides: tuple[str, ...]
    settings: dict[str, Any]
    stages: PlannedStages
    prediction: dict[str, Any]
    text: str = ""


def plan_as_data(
    result: PlanResult,
    cluster: str,
    *,
    overrides: Sequence[str] = (),
    scale: str | None = None,
    epochs: float | None = None,
) -> dict[str, Any]:
    """Everything of a plan, as plain data: also what `--json` prints.

    overrides, scale, epochs: as the user typed them after `megabatch plan`. Epochs to a target are taken from the
    prediction and rounded up to three digits.
    """
    chosen, way, load = result.chosen, result.chosen.candidate, result.load
    assumed = load.epochs
    if not math.isclose(chosen.epochs.middle, assumed):  # those to a target
        assumed = epochs = _rounded_up(chosen.epochs.middle)
    return {
        "megabatch_plan": _FORMAT,
        "recipe": load.name,
        "cluster": cluster,
        "goal": result.reason,
        "workers": way.workers,
        "grid": way.grid.text,
        "scale": scale,
        "epochs": epochs,
        "overrides": list(overrides),
        "settings": {
            "comm.algorithm": way.algorithm,
            "comm.bucket_mb": way.bucket_mb if math.isfinite(way.bucket_mb) else load.bucket_mb_of_all,
            _BATCH: load.stages_over(assumed).text,
            "train.epochs": assumed,
            "train.ghost_batch_size": chosen.step_time.ghost_batch_size,
        },
        # The stages as they were before they were stretched, for a run over yet another length.
        "stages": {"global_batch_size": load.stages.text, "epochs": assumed if load.fixed_stages else load.epochs},
        "prediction": _estimate_as_data(chosen),
        "candidates": [_estimate_as_data(one) for one in result.candidates],
        "front": [result.candidates.index(one) for one in result.front],
        "num_considered": result.num_considered,
        "left_out": list(result.left_out),
        "binding": result.binding,
        "sensitivity": [dataclasses.asdict(one) for one in result.sensitivity],
    }


def _estimate_as_data(one: Estimate) -> dict[str, Any]:
    """One estimate; seconds, and 80 % intervals as low and high."""
    way = one.candidate

    def part(*names: str) -> Interval:
        """Parts of a step, as uncertain as the whole of it."""
        return one.step.times(sum(one.step_time.parts[name] for name in names) / one.step.middle)

    intervals = {
        "step_seconds": one.step,
        "compute_seconds": part("compute"),
        "communication_and_waiting_seconds": part("exposed communication", "stragglers"),
        "data_seconds": part("loader"),
        "images_per_second": one.images_per_second,
        "epochs": one.epochs,
        "training_seconds": one.training,
        "total_seconds": one.total,
        "node_hours": one.node_hours,
        "cost": one.cost,
    }
    return {
        "workers": way.workers,
        "algorithm": way.algorithm,
        "grid": way.grid.text,
        "bucket_mb": way.bucket_mb if math.isfinite(way.bucket_mb) else "all",
        "batch": one.batch,
        "local_batch": one.step_time.local_batch,
        "ghost_batch_size": one.step_time.ghost_batch_size,
        "efficiency": one.step_time.efficiency,
        "steps": one.steps,
        "currency": one.currency,
        "largest_part": one.step_time.largest_part,
        **{name: dataclasses.asdict(value) if value else None for name, value in intervals.items()},
        "step_parts_seconds": dict(one.step_time.parts),
        "time_parts_seconds": dict(one.time_parts),
        "hidden_and_exposed_communication_seconds": one.step_time.communication_seconds,
        "warnings": list(one.warnings),
        "notes": list(one.notes),
    }


def write_plan(path: Path, data: Mapping[str, Any], recipe: str) -> None:
    """Write a plan, if `megabatch train --plan` can read its settings: better to know now than on a cluster."""
    overrides = [*data["overrides"], *_assignments(data["settings"])]
    try:
        load_config(recipe, overrides, scale=data["scale"], epochs=data["epochs"])
    except MegabatchError as error:
        raise ConfigError(f"the plan could not be followed: {error}") from None
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def read_plan(path: str | Path) -> PlannedRun:
    try:
        text = read_text(Path(path))
        content = parse_json(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan '{path}' cannot be read ({error}); give a file of `megabatch plan --output`") from None
    if not isinstance(content, dict) or content.get("megabatch_plan") != _FORMAT:
        raise ConfigError(f"'{path}' is no plan of this version; write one with `megabatch plan --output plan.json`")
    try:
        planned = PlannedRun.model_validate(content)
    except ValidationError as error:
        damage = f"plan '{path}' is damaged ({': '.join(complaint(error))})"
        raise ConfigError(f"{damage}; write it anew with `megabatch plan --output`") from None
    overrides = (*planned.overrides, *_assignments(planned.settings))
    return planned.model_copy(update={"overrides": overrides, "text": text})


def follow(
    path: Path,
    recipe: str,
    grid: str | None,
    workers: int | None,
    environ: Mapping[str, str],
    *,
    scale: str | None = None,
    epochs: float | None = None,
) -> PlannedRun:
    """A plan for a run of `recipe`; a grid, workers or epochs that were typed win over it.

    Under a launcher the workers are those it started. Without one, local workers are started, and a plan for a cluster
    is refused: nobody wants its thousands of workers on one machine. So is a plan for another recipe or scale.
    """
    planned = read_plan(path)
    if planned.recipe != Path(recipe).stem:
        raise ConfigError(
            f"plan '{path}' is for recipe '{planned.recipe}', '{recipe}' was given; plan that one, or train the other"
        )
    if scale is not None and scale != planned.scale:
        made = f"plan '{path}' is for {f'--scale {planned.scale}' if planned.scale else 'the recipe as it is'}"
        raise ConfigError(f"{made}, --scale {scale} was given; plan that one, or leave --scale out")
    assert planned.workers is not None
    launched = any(name in environ for name in _OF_LAUNCHERS)
    if not launched and workers is None and planned.workers > _MOST_LOCAL_WORKERS:
        raise ConfigError(
            f"plan '{path}' is for {planned.workers:,} workers and no launcher has started them; "
            "put srun, torchrun or mpirun before the command"
        )
    wanted = workers or (None if launched else planned.workers)
    fits = wanted is None or wanted == planned.workers
    if epochs is not None:
        planned = _over_other_epochs(planned, epochs)
    return planned.model_copy(update={"workers": wanted, "grid": grid or (planned.grid if fits else None)})


def _over_other_epochs(planned: PlannedRun, epochs: float) -> PlannedRun:
    """The plan over as many epochs as were typed, its batch stages compressed or stretched alike."""
    others = [one for one in planned.overrides if one.partition("=")[0].strip() not in ("train.epochs", _BATCH)]
    stages = parse_stages(planned.stages.global_batch_size).stretched(epochs / planned.stages.epochs)
    overrides = (*others, f"{_BATCH}={json.dumps(stages.text)}")
    return planned.model_copy(update={"overrides": overrides, "epochs": epochs})


def _assignments(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def _rounded_up(epochs: float) -> float:
    """To three digits, so that a short run does not become a longer one."""
    unit = 10.0 ** (math.floor(math.log10(epochs)) - 2)
    return round(math.ceil(epochs / unit - 1e-6) * unit, 9)
