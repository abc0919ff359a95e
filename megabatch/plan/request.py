"""From what the user typed to a plan: reads the recipe, the cluster and the calibration, and searches."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.shape import parse_grid
from megabatch.errors import ConfigError, nearest
from megabatch.plan.calibrate import Evidence, gather
from megabatch.plan.cluster import cluster_names, load_cluster
from megabatch.plan.convergence import MLPERF_TARGET, ConvergenceLaw, mlperf_law, read_study
from megabatch.plan.estimate import Estimator
from megabatch.plan.fit import fit_as_data
from megabatch.plan.plan_file import plan_as_data
from megabatch.plan.search import Goal, PlanResult, Space, plan, worker_counts
from megabatch.plan.workload import IMAGENET_TRAIN, Workload, workload_of
from megabatch.schedule.batch import parse_stages

__all__ = ["Answer", "PlanRequest", "parse_duration", "run"]

_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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
        asked, fit = self.request, self.evidence.fit
        data = plan_as_data(
            self.result,
            self.evidence.cluster.name,
            overrides=asked.overrides,
            scale=asked.scale,
            epochs=asked.epochs,
        )
        sources = list(self.evidence.sources)
        return data | {"calibration": {"sources": sources, "fit": fit_as_data(fit) if fit else None}}


def run(request: PlanRequest) -> Answer:
    """Plan, without a word."""
    if not request.recipe:
        raise ConfigError("no recipe given; name one of `megabatch recipes`, or a TOML file, before --cluster")
    if not request.cluster:
        raise ConfigError(f"no cluster given; add --cluster with one of {', '.join(cluster_names())}, or a TOML file")
    for name in request.algorithms:
        if name not in ALGORITHMS:
            hint = nearest(name, ALGORITHMS)
            raise ConfigError(f"all-reduce algorithm '{name}' is unknown; known: {', '.join(ALGORITHMS)}{hint}")
    evidence = gather(load_cluster(request.cluster), request.calibrate, request.family, request.stack)
    workload = workload_of(
        request.recipe, list(request.overrides), evidence.layers, scale=request.scale, epochs=request.epochs
    )
    batches = [parse_stages(text) for text in request.batches]
    result = plan(
        Estimator(evidence.cluster, workload, _law(request, workload), evidence.fit),
        worker_counts(evidence.cluster, request.workers),
        _goal(request),
        batches=batches,
        space=Space(request.algorithms, parse_grid(request.grid) if request.grid else None, request.bucket_mb),
    )
    return Answer(request, result, evidence, workload)


def parse_duration(text: str) -> float:
    """Read "90", "90s", "10min" or "2h" as seconds."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", text.lower())
    try:
        assert match is not None
        seconds = float(match[1]) * _UNITS[match[2] or "s"]
    except (AssertionError, ValueError, KeyError):
        raise ConfigError(f"duration '{text}' cannot be read; write 90s, 10min or 2h") from None
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


def _law(request: PlanRequest, workload: Workload) -> ConvergenceLaw | None:
    target = None if request.target is None else request.target / 100 if request.target > 1 else request.target
    if target is not None and not 0 < target < 1:
        raise ConfigError(f"target {request.target:g} is no accuracy; give top-1 in per cent, such as 75.9")
    typed = [text for text in request.overrides if text.partition("=")[0].strip() == "train.epochs"]
    typed += [] if request.epochs is None else [f"--epochs {request.epochs:g}"]
    if typed and (target is not None or request.study is not None):
        raise ConfigError(
            f"{typed[0]} was given beside --target or --study, which say how many epochs it takes; leave one of them "
            "out"
        )
    if request.study is not None:
        return read_study(request.study, target)
    if target is None:
        return None
    if abs(target - MLPERF_TARGET) > 0.0015:
        raise ConfigError(
            f"target {100 * target:g} % is not the {100 * MLPERF_TARGET:g} % of the stored convergence points, which "
            "say nothing about it; give your own runs with --study, or leave --target out to count the recipe's epochs"
        )
    if (workload.model, workload.num_train) != ("resnet50", IMAGENET_TRAIN):
        raise ConfigError(
            f"the stored convergence points are of resnet50 on ImageNet's {IMAGENET_TRAIN:,} images, the recipe "
            f"trains {workload.model} on {workload.num_train:,}; give your own runs with --study, or leave --target out"
        )
    return mlperf_law()
