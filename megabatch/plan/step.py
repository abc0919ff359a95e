"""Seconds of one update: compute, the communication that the backward pass does not hide, stragglers, the loader.

    update = max(loader, compute + exposed communication) + straggler

Compute is the table of the cluster times the ghost batches a worker takes. Buckets of gradients become ready during
the backward pass of the last ghost batch and travel one after another; what is still on its way when it ends is
exposed. The straggler term is the expected maximum over the workers, whose times scatter by a part of the compute
and by a jitter that does not shrink with the batch. With a fit to rows of whole systems (`Cluster` stays the
network, `StepFit` knows the step) the fit replaces the sum, and an algorithm counts by how much more or less it
exposes than the backend's own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from megabatch.comm.shape import GridShape
from megabatch.errors import ConfigError
from megabatch.plan.calibrate import StepFit
from megabatch.plan.cluster import KNOBS, Cluster
from megabatch.plan.cost import price_all_reduce
from megabatch.plan.ghosts import busiest_passes, fitting_ghost
from megabatch.plan.interval import Reach, combine, reach_deviation, reach_warnings
from megabatch.plan.straggler import empirical_maximum, expected_maximum
from megabatch.plan.workload import Workload, fill_buckets, model_layers

__all__ = [
    *("Candidate", "StepTime", "exposed_seconds", "ghost_of", "step_deviation", "step_notes", "step_time"),
    "step_warnings",
]

_OTHER_MODEL = 0.15
_ROUGH_COLLECTIVES = 0.5
"""Relative deviation of what the rough formula of a backend's tree leaves exposed."""
_SMALL = 1.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a workload: how many workers, and how gradients travel.

    ghost_batch 0: the recipe's own, made smaller where the workers are too many for it.
    """

    workers: int
    algorithm: str
    grid: GridShape
    bucket_mb: float
    ghost_batch: int = 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an update and its parts; `binding` names the largest: "compute", "NIC", "latency", "stragglers"."""

    seconds: float
    parts: Mapping[str, float]
    communication_seconds: float
    local_batch: float
    ghost_batch: int
    binding: str
    alone_seconds: float

    @property
    def efficiency(self) -> float:
        """One worker alone, on the same pictures, over this."""
        return self.alone_seconds / self.seconds


def ghost_of(cluster: Cluster, workload: Workload, workers: int, fit: StepFit | None = None) -> int:
    """The ghost batch of a plan for so many workers; see `ghosts`."""
    return fitting_ghost(workload, workers, fit.pass_seconds if fit else cluster.compute.seconds)


def step_time(
    cluster: Cluster, workload: Workload, candidate: Candidate, batch_total: int, fit: StepFit | None = None
) -> StepTime:
    """Seconds of one update of `batch_total` pictures.

    Raises:
        ConfigError: too few pictures for the workers, or a network the cluster's step times say nothing about.
    """
    workers = candidate.workers
    ghost = candidate.ghost_batch or ghost_of(cluster, workload, workers, fit)
    passes = busiest_passes(batch_total, ghost, workers)
    nodes = -(-workers // cluster.workers_per_node)
    one_pass = cluster.compute.seconds(ghost) * _model_factor(cluster, workload)
    compute = passes * one_pass
    exposed, whole, link = exposed_seconds(cluster, workload, candidate, one_pass)
    if fit is not None:
        backend = Candidate(workers, "backend", GridShape((1, workers)), workload.bucket_mb)
        usual = exposed_seconds(cluster, workload, backend, one_pass)[0]
        parts = fit.parts(ghost, workers, nodes, passes)
        compute, straggler = parts["compute"], parts["stragglers"]
        exposed = max(0.0, parts["exposed communication"] + exposed - usual)
    elif cluster.straggler_ratios:
        middle = statistics.fmean(cluster.straggler_ratios)
        straggler = compute * (empirical_maximum(cluster.straggler_ratios, workers) - middle)
    else:
        scatter = math.hypot(cluster.straggler_deviation.value * compute, cluster.jitter_seconds.value)
        straggler = scatter * expected_maximum(workers)
    loader = 0.0
    if cluster.loader_images_per_second is not None:
        loader = batch_total / nodes / cluster.loader_images_per_second.value
    wait = max(0.0, loader - compute - exposed)
    of_step = {"compute": compute, "exposed communication": exposed, "stragglers": straggler, "loader": wait}
    seconds = sum(of_step.values())
    if not math.isfinite(seconds) or seconds <= 0:
        raise ConfigError(f"the step comes out as {seconds} s, which cannot be; check the numbers of '{cluster.name}'")
    largest = max(of_step, key=lambda name: of_step[name])
    binding = link if largest == "exposed communication" else largest
    return StepTime(seconds, of_step, whole, passes * ghost, ghost, binding, compute)


def exposed_seconds(
    cluster: Cluster, workload: Workload, candidate: Candidate, pass_seconds: float
) -> tuple[float, float, str]:
    """(seconds left when the backward pass ends, seconds of all buckets, what takes most of them)."""
    if candidate.workers == 1:
        return 0.0, 0.0, "nothing"
    backward = cluster.compute.backward_share * pass_seconds
    end = whole = 0.0
    by_part: dict[str, float] = {}
    known: dict[int, tuple[float, Mapping[str, float]]] = {}
    for bucket in fill_buckets(workload.layers, workload.bytes_per_parameter, candidate.bucket_mb):
        if bucket.num_bytes not in known:
            price = price_all_reduce(cluster, candidate.algorithm, candidate.grid, bucket.num_bytes)
            known[bucket.num_bytes] = price.seconds, price.parts
        seconds, parts = known[bucket.num_bytes]
        end = max(end, bucket.ready * backward) + seconds
        whole += seconds
        for name, part in parts.items():
            by_part[name] = by_part.get(name, 0.0) + part
    return max(0.0, end - backward), whole, max(by_part, key=lambda name: by_part[name])


def step_deviation(
    cluster: Cluster, workload: Workload, candidate: Candidate, batch_total: int, fit: StepFit | None = None
) -> float:
    """Relative standard deviation of `step_time`: every uncertain number of the cluster, and the model's form."""
    here = step_time(cluster, workload, candidate, batch_total, fit)
    other_model = _OTHER_MODEL if cluster.compute.model != workload.model else 0.0
    rough = 0.0
    if _is_rough(cluster, candidate):
        rough = _ROUGH_COLLECTIVES * here.parts["exposed communication"] / here.seconds
    if fit is not None:
        nodes, passes = -(-candidate.workers // cluster.workers_per_node), round(here.local_batch / here.ghost_batch)
        return combine(fit.deviation(here.ghost_batch, candidate.workers, nodes, passes), other_model)
    squares = 0.0
    for knob in KNOBS:
        deviation = cluster.deviation(knob)
        if deviation:
            changed = step_time(cluster.changed(knob, _SMALL), workload, candidate, batch_total)
            squares += (deviation * math.log(changed.seconds / here.seconds) / math.log(_SMALL)) ** 2
    form = reach_deviation(_reach(cluster, candidate))
    return combine(math.sqrt(squares), form, cluster.compute.deviation(here.ghost_batch), other_model, rough)


def step_warnings(
    cluster: Cluster, workload: Workload, candidate: Candidate, batch_total: int, fit: StepFit | None = None
) -> list[str]:
    """What makes the interval wide, for people."""
    here = step_time(cluster, workload, candidate, batch_total, fit)
    found = []
    if cluster.compute.model != workload.model:
        found.append(f"step times are of {cluster.compute.model}, scaled to {workload.model} by multiply-adds")
    if fit is not None:
        nodes = -(-candidate.workers // cluster.workers_per_node)
        return found + fit.warnings(here.ghost_batch, candidate.workers, nodes)
    found += cluster.compute.warnings(here.ghost_batch)
    found += reach_warnings(_reach(cluster, candidate))
    if _is_rough(cluster, candidate) and here.parts["exposed communication"] > 0:
        found.append("the backend's own all-reduce is priced by a rough formula, the better of ring and tree")
    return found


def step_notes(cluster: Cluster, workload: Workload, candidate: Candidate, batch_total: int) -> list[str]:
    """What to know about an update that makes no interval wider."""
    found = []
    ghost = candidate.ghost_batch or ghost_of(cluster, workload, candidate.workers)
    if ghost != workload.ghost_batch:
        found.append(
            f"ghost batch {workload.ghost_batch} gives fewer ghosts than workers; {ghost} is used instead: "
            "batch-norm then sees other statistics than the recipe's"
        )
    idle = candidate.workers - batch_total // ghost
    if idle > 0:
        found.append(
            f"{idle:,} of {candidate.workers:,} workers have no ghost batch of {batch_total:,} pictures to take"
        )
    if batch_total > workload.num_train:
        found.append(
            f"an update of {batch_total:,} pictures is more than the whole set of {workload.num_train:,}: "
            "no such training is known to work"
        )
    return found


def _is_rough(cluster: Cluster, candidate: Candidate) -> bool:
    return candidate.algorithm == "backend" and cluster.collectives == "tree" and candidate.workers > 1


def _reach(cluster: Cluster, candidate: Candidate) -> Reach:
    """A cluster file knows one node; a calibration knows the world it was measured in."""
    if cluster.calibration is not None:
        known, what = cluster.calibration.shape.num_ranks, "of the measured grid"
    else:
        known, what = cluster.workers_per_node, "of one node, which is what the cluster file knows"
    return Reach(workers=max(0.0, math.log2(candidate.workers / known)), known_workers=f"{what} ({known:,})")


def _model_factor(cluster: Cluster, workload: Workload) -> float:
    if cluster.compute.model == workload.model:
        return 1.0
    if not workload.work:
        raise ConfigError(
            f"cluster '{cluster.name}' has step times of {cluster.compute.model}, the recipe trains {workload.model}; "
            "measure it with `megabatch bench step` and give the file with --calibrate"
        )
    return workload.work / model_layers(cluster.compute.model)[1]
