"""The plan as a file: what `megabatch plan --output plan.json` writes and `megabatch train --plan plan.json`
follows.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import ConfigError, MegabatchError
from megabatch.files import write_atomically
from megabatch.plan.estimate import Estimate
from megabatch.plan.quantity import Interval
from megabatch.plan.search import PlanResult
from megabatch.recipes import load_config
from megabatch.schedule.batch import parse_stages

__all__ = ["PlannedRun", "estimate_as_data", "follow", "plan_as_data", "read_plan"]

FORMAT = 1
_MOST_LOCAL_WORKERS = 64
_BATCH = "train.global_batch_size"


@dataclass(frozen=True)
class PlannedRun:
    """What a run takes from a plan file; `text` is the file itself, kept with the run.

    overrides: those of the user, then the planner's, so that the planner's win. scale, epochs: None where the recipe is
    taken as it is, and in files of versions that did not write them (`knows_scale` tells the two apart).
    stages: the total batch, and the epochs of the run that it is written for; None in files of older versions.
    """

    recipe: str
    workers: int | None
    grid: str | None
    overrides: tuple[str, ...]
    prediction: dict[str, Any]
    text: str
    scale: str | None = None
    epochs: float | None = None
    knows_scale: bool = False
    stages: tuple[int | str, float] | None = None


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
    chosen, load = result.chosen, result.load
    bucket = chosen.candidate.bucket_mb
    assumed = load.epochs
    if not math.isclose(chosen.epochs.middle, assumed):  # those to a target
        assumed = epochs = _rounded_up(chosen.epochs.middle)
    settings: dict[str, Any] = {
        "comm.algorithm": chosen.candidate.algorithm,
        "comm.bucket_mb": bucket if math.isfinite(bucket) else load.bucket_mb_of_all,
        _BATCH: load.stages_over(assumed).text,
        "train.epochs": assumed,
        "train.ghost_batch_size": chosen.ghost_batch_size,
    }
    return {
        "megabatch_plan": FORMAT,
        "recipe": load.name,
        "cluster": cluster,
        "goal": result.reason,
        "workers": chosen.candidate.workers,
        "grid": chosen.candidate.grid.text,
        "scale": scale,
        "epochs": epochs,
        "overrides": list(overrides),
        "settings": settings,
        # The stages as they were before they were stretched, for a run over yet another length.
        "stages": {_BATCH: load.stages.text, "train.epochs": assumed if load.fixed_stages else load.epochs},
        "prediction": estimate_as_data(chosen),
        "candidates": [estimate_as_data(one) for one in result.candidates],
        "front": [result.candidates.index(one) for one in result.front],
        "num_considered": result.num_considered,
        "left_out": list(result.left_out),
        "binding": result.binding,
        "sensitivity": [dataclasses.asdict(one) for one in result.sensitivity],
    }


def estimate_as_data(one: Estimate) -> dict[str, Any]:
    """One estimate; seconds, and 80 % intervals as low and high."""
    bucket = one.candidate.bucket_mb
    return {
        "workers": one.candidate.workers,
        "algorithm": one.candidate.algorithm,
        "grid": one.candidate.grid.text,
        "bucket_mb": bucket if math.isfinite(bucket) else "all",
        "batch": one.batch,
        "local_batch": one.local_batch,
        "ghost_batch_size": one.ghost_batch_size,
        "step_seconds": _interval(one.step),
        "step_parts_seconds": dict(one.step_parts),
        "compute_seconds": _part(one, "compute"),
        "communication_and_waiting_seconds": _part(one, "exposed communication", "stragglers"),
        "data_seconds": _part(one, "loader"),
        "hidden_and_exposed_communication_seconds": one.communication_seconds,
        "images_per_second": _interval(one.images_per_second),
        "efficiency": one.efficiency,
        "epochs": _interval(one.epochs),
        "steps": one.steps,
        "time_parts_seconds": dict(one.time_parts),
        "training_seconds": _interval(one.training),
        "total_seconds": _interval(one.total),
        "node_hours": _interval(one.node_hours),
        "cost": _interval(one.cost) if one.cost else None,
        "currency": one.currency,
        "largest_part": one.largest_part,
        "warnings": list(one.warnings),
        "notes": list(one.notes),
    }


def write_plan(path: Path, data: Mapping[str, Any], recipe: str) -> None:
    """Write a plan, if `megabatch train --plan` can read its settings: better to know now than on a cluster.

    Raises:
        ConfigError: it could not be followed.
    """
    settings = [f"{key}={json.dumps(value)}" for key, value in data["settings"].items()]
    try:
        load_config(recipe, [*data["overrides"], *settings], scale=data["scale"], epochs=data["epochs"])
    except MegabatchError as error:
        raise ConfigError(f"the plan could not be followed: {error}") from None
    write_atomically(path, json.dumps(data, indent=1) + "\n")


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
        chosen = tuple(f"{key}={json.dumps(value)}" for key, value in content["settings"].items())
        typed = content.get("overrides", [])
        if not isinstance(typed, list) or not all(isinstance(one, str) for one in typed):
            raise ValueError("overrides")
        scale, epochs, stages = content.get("scale"), content.get("epochs"), content.get("stages")
        return PlannedRun(
            str(content["recipe"]),
            int(content["workers"]),
            str(content["grid"]),
            (*typed, *chosen),
            dict(content["prediction"]),
            text,
            None if scale is None else str(scale),
            None if epochs is None else float(epochs),
            "scale" in content,
            stages and (stages[_BATCH], float(stages["train.epochs"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"plan '{path}' is damaged ({error}); write it anew with `megabatch plan --output`") from None


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
    is refused: nobody wants its thousands of workers on one machine.

    Raises:
        ConfigError: the plan is for another recipe or scale, or needs a cluster and this is none.
    """
    planned = read_plan(path)
    if planned.recipe != Path(recipe).stem:
        raise ConfigError(
            f"plan '{path}' is for recipe '{planned.recipe}', '{recipe}' was given; plan that one, or train the other"
        )
    if scale is not None and planned.knows_scale and scale != planned.scale:
        made = f"--scale {planned.scale}" if planned.scale else "the recipe as it is"
        raise ConfigError(
            f"plan '{path}' is for {made}, --scale {scale} was given; plan that one, or leave --scale out"
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
    if epochs is not None:
        planned = _over_other_epochs(planned, epochs)
    return dataclasses.replace(
        planned,
        workers=wanted,
        grid=grid or (planned.grid if fits else None),
        scale=planned.scale or scale,
    )


def _over_other_epochs(planned: PlannedRun, epochs: float) -> PlannedRun:
    """The plan over as many epochs as were typed, its batch stages compressed or stretched alike."""
    left_out = ("train.epochs", _BATCH) if planned.stages else ("train.epochs",)
    kept = [one for one in planned.overrides if one.partition("=")[0].strip() not in left_out]
    if planned.stages:
        text, made_for = planned.stages
        kept.append(f"{_BATCH}={json.dumps(parse_stages(text).stretched(epochs / made_for).text)}")
    return dataclasses.replace(planned, overrides=tuple(kept), epochs=epochs)


def _rounded_up(epochs: float) -> float:
    """To three digits, so that a short run does not become a longer one."""
    unit = 10.0 ** (math.floor(math.log10(epochs)) - 2)
    return round(math.ceil(epochs / unit - 1e-6) * unit, 9)


def _interval(value: Interval) -> dict[str, float]:
    return {"middle": value.middle, "low": value.low, "high": value.high}


def _part(one: Estimate, *names: str) -> dict[str, float]:
    """Parts of a step, as uncertain as the whole of it."""
    seconds = sum(one.step_parts[name] for name in names)
    return _interval(one.step.times(seconds / one.step.middle))
