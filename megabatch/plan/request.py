"""A plan from what the user typed: the request, its mistakes, and the answer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megabatch.comm.phases import ALGORITHMS
from megabatch.comm.shape import parse_grid
from megabatch.errors import ConfigError, nearest
from megabatch.plan.calibrate import Evidence, gather
from megabatch.plan.cluster_file import cluster_names, load_cluster
from megabatch.plan.convergence import STUDY_TABLE, ConvergenceLaw, choose_law
from megabatch.plan.estimate import Estimator
from megabatch.plan.fit import fit_as_data
from megabatch.plan.plan_file import plan_as_data
from megabatch.plan.search import Goal, PlanResult, Space, plan
from megabatch.plan.workload import Workload, workload_of
from megabatch.schedule.batch import parse_stages
from megabatch.text import read_seconds


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
    law: ConvergenceLaw | None = None

    @property
    def epochs_from(self) -> str:
        """On what the number of epochs rests."""
        own = f"the recipe's own {self.workload.epochs:g}"
        return own if self.law is None else f"{self.law.evidence}, not {own}"

    def as_data(self) -> dict[str, Any]:
        """What `--json` prints and `--output` writes."""
        asked, fit, name = self.request, self.evidence.fit, self.evidence.cluster.name
        calibration = {"sources": list(self.evidence.sources), "fit": fit_as_data(fit) if fit else None}
        data = plan_as_data(self.result, name, overrides=asked.overrides, scale=asked.scale, epochs=asked.epochs)
        memory = asdict(self.workload.memory) if self.workload.memory else None  # for the recipe's ghost batch
        return data | {"calibration": calibration, "memory": memory, "epochs_from": self.epochs_from}


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
    result = plan(estimator, counts, _goal(request), batches=batches, space=space)
    return Answer(request, result, evidence, workload, law)


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


def _goal(request: PlanRequest) -> Goal:
    if request.objective not in ("time", "cost"):
        raise ConfigError(f"objective '{request.objective}' is unknown; choose time or cost")
    if request.budget is not None and not request.budget > 0:
        raise ConfigError(f"budget {request.budget:g} buys nothing; give an amount above 0")
    deadline = read_seconds(request.deadline, "--deadline") if request.deadline else math.inf
    return Goal(request.objective, deadline, request.budget or math.inf)
