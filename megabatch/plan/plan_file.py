"""Plans from what the user typed, and as files: what `megabatch plan --output plan.json` writes and `train` follows.

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
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.shape import parse_grid
from megabatch.errors import ConfigError, MegabatchError, nearest
from megabatch.files import parse_json, read_text, write_atomically
from megabatch.plan.calibrate import Evidence, gather
from megabatch.plan.cluster_file import cluster_names, load_cluster
from megabatch.plan.convergence import STUDY_TABLE, choose_law
from megabatch.plan.estimate import Estimate, Estimator
from megabatch.plan.fit import fit_as_data
from megabatch.plan.quantity import Interval, complaint
from megabatch.plan.search import Goal, PlanResult, Space, plan
from megabatch.plan.workload import Workload, workload_of
from megabatch.recipes import load_config
from megabatch.schedule.batch import parse_stages

_FORMAT = 1
_MOST_LOCAL_WORKERS = 64
_OF_LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
_BATCH = "train.global_batch_size"
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class PlanRequest:
    """The words after `megabatch plan` that say what is planned."""

    recipe: str
    cluster: str
    workers: str | None = None
    target: float | None = None
    study: Path | None = None
    calibrate: tuple[str, ...] = ()
    family: str = ""
    stack: str = ""
    batches: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    grid: str | None = None
    bucket_mb: float | None = None
    objective: str = "time"
    deadline: str | None = None
    budget: float | None = None
    overrides: tuple[str, ...] = ()
    scale: str | None = None
    epochs: float | None = None


@dataclass(frozen=True)
class Answer:
    """A plan, and what it was made of."""

    request: PlanRequest
    result: PlanResult
    evidence: Evidence
    workload: Workload

    def as_data(self) -> dict[str, Any]:
        """What `--json` prints and `--output` writes."""
        asked, fit, name = self.request, self.evidence.fit, self.evidence.cluster.name
        calibration = {"sources": list(self.evidence.sources), "fit": fit_as_data(fit) if fit else None}
        data = plan_as_data(self.result, name, overrides=asked.overrides, scale=asked.scale, epochs=asked.epochs)
        return data | {"calibration": calibration}


def run(request: PlanRequest) -> Answer:
    request, sources = _with_study(request)
    _refuse_mistakes(request)
    evidence = gather(load_cluster(request.cluster), sources, request.family, request.stack)
    cluster, layers, words = evidence.cluster, evidence.layers, list(request.overrides)
    workload = workload_of(request.recipe, words, layers, scale=request.scale, epochs=request.epochs)
    law = choose_law(request.target, request.study, workload)
    estimator = Estimator(cluster, workload, law, evidence.fit)
    counts, batches = cluster.worker_counts(request.workers), [parse_stages(text) for text in request.batches]
    space = Space(request.algorithms, parse_grid(request.grid) if request.grid else None, request.bucket_mb)
    return Answer(request, plan(estimator, counts, _goal(request), batches=batches, space=space), evidence, workload)


def _with_study(request: PlanRequest) -> tuple[PlanRequest, tuple[str, ...]]:
    """The request with a study among its calibration sources taken as its study, and the other sources."""
    tables: dict[str, Path] = {}
    for text in request.calibrate:
        path = Path(text)
        if (path / STUDY_TABLE).is_file():
            tables[text] = path / STUDY_TABLE
        elif path.name == STUDY_TABLE:
            tables[text] = path
    given = [*tables.values(), *([request.study] if request.study else [])]
    if len(given) > 1:
        raise ConfigError(f"{len(given)} studies were given ({', '.join(map(str, given))}); give one")
    others = tuple(text for text in request.calibrate if text not in tables)
    return replace(request, study=given[0] if given else None), others


def _refuse_mistakes(request: PlanRequest) -> None:
    """Refuse what can be seen to be wrong before anything is read."""
    if not request.recipe:
        raise ConfigError("no recipe given; name one of `megabatch recipes`, or a TOML file, before --cluster")
    if not request.cluster:
        raise ConfigError(f"no cluster given; add --cluster with one of {', '.join(cluster_names())}, or a TOML file")
    for name in request.algorithms:
        if name not in ALGORITHMS:
            hint = nearest(name, ALGORITHMS)
            raise ConfigError(f"all-reduce algorithm '{name}' is unknown; known: {', '.join(ALGORITHMS)}{hint}")
    typed = [text for text in request.overrides if text.partition("=")[0].strip() == "train.epochs"]
    typed += [] if request.epochs is None else [f"--epochs {request.epochs:g}"]
    if typed and (request.target is not None or request.study is not None):
        twice = f"{typed[0]} was given beside --target or --study, which say how many epochs it takes"
        raise ConfigError(f"{twice}; leave one of them out")


def parse_duration(text: str) -> float:
    """Read "90", "90s", "10min" or "2h" as seconds."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"duration '{text}' cannot be read; write 90s, 10min or 2h")
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds <= 0:
        raise ConfigError(f"duration '{text}' is not above 0; write 90s, 10min or 2h")
    return seconds


def _goal(request: PlanRequest) -> Goal:
    if request.objective not in ("time", "cost"):
        raise ConfigError(f"objective '{request.objective}' is unknown; choose time or cost")
    if request.budget is not None and not request.budget > 0:
        raise ConfigError(f"budget {request.budget:g} buys nothing; give an amount above 0")
    deadline = parse_duration(request.deadline) if request.deadline else math.inf
    return Goal(request.objective, deadline, request.budget or math.inf)


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
