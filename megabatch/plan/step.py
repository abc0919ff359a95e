"""Seconds of one step: compute, the communication that the backward pass does not hide, stragglers, the loader.

    step = max(loader, compute + exposed communication) + straggler

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
from megabatch.plan.cluster import KNOBS, NETWORK_KNOBS, Cluster
from megabatch.plan.cost import price_all_reduce
from megabatch.plan.ghosts import busiest_passes, fitting_ghost
from megabatch.plan.interval import Reach, combine, reach_deviation, reach_warnings
from megabatch.plan.step_fit import StepFit
from megabatch.plan.straggler import empirical_maximum, expected_maximum
from megabatch.plan.workload import Layer, Workload, fill_buckets, model_layers

__all__ = [
    *("Candidate", "StepTime", "exposed_seconds", "ghost_of", "step_deviation", "step_notes", "step_time"),
    "step_warnings",
]

ROWS_OF = ("resnet50", 224)
"""What rows of systems train: the network of MLPerf's image classification, and the pixels a side of its images."""
_OTHER_MODEL = 0.15
_ROUGH_COLLECTIVES = 0.5
"""Relative deviation of what the rough formula of a backend's tree leaves exposed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a workload: how many workers, and how gradients travel.

    ghost_batch_size 0: the recipe's own, made smaller where the workers are too many for it.
    """

    workers: int
    algorithm: str
    grid: GridShape
    bucket_mb: float
    ghost_batch_size: int = 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step and its parts; `largest_part`: "compute", "NIC", "latency", "stragglers", "loader"."""

    seconds: float
    parts: Mapping[str, float]
    communication_seconds: float
    local_batch: float
    ghost_batch_size: int
    largest_part: str
    alone_seconds: float

    @property
    def efficiency(self) -> float:
        """One worker alone, on the same images, over this."""
        return self.alone_seconds / self.seconds


def ghost_of(cluster: Cluster, workload: Workload, workers: int, fit: StepFit | None = None) -> int:
    """The ghost batch of a plan for so many workers; see `ghosts`."""
    return fitting_ghost(workload, workers, fit.pass_seconds if fit else cluster.compute.seconds)


def step_time(
    cluster: Cluster, workload: Workload, candidate: Candidate, global_batch_size: int, fit: StepFit | None = None
) -> StepTime:
    """Seconds of one step of `global_batch_size` images.

    Raises:
        ConfigError: too few images for the workers, or a network the cluster's step times say nothing about.
    """
    workers = candidate.workers
    ghost = candidate.ghost_batch_size or ghost_of(cluster, workload, workers, fit)
    passes = busiest_passes(global_batch_size, ghost, workers)
    nodes = cluster.nodes_of(workers)
    one_pass = cluster.compute.seconds(ghost) * _work_factor(cluster, workload)
    compute = passes * one_pass
    exposed, whole, link = exposed_seconds(cluster, workload, candidate, one_pass)
    if fit is not None:
        usual = _usually_exposed(cluster, workload, workers, one_pass)
        parts = fit.parts(ghost, workers, nodes, passes, _work_factor(cluster, workload, fit))
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
        loader = global_batch_size / nodes / cluster.loader_images_per_second.value
    wait = max(0.0, loader - compute - exposed)
    of_step = {"compute": compute, "exposed communication": exposed, "stragglers": straggler, "loader": wait}
    seconds = sum(of_step.values())
    if not math.isfinite(seconds) or seconds <= 0:
        raise ConfigError(f"the step comes out as {seconds} s, which cannot be; check the numbers of '{cluster.name}'")
    largest = max(of_step, key=lambda name: of_step[name])
    largest = link if largest == "exposed communication" else largest
    return StepTime(seconds, of_step, whole, passes * ghost, ghost, largest, compute)


def exposed_seconds(
    cluster: Cluster, workload: Workload, candidate: Candidate, pass_seconds: float
) -> tuple[float, float, str]:
    """(seconds left when the backward pass ends, seconds of all buckets, what takes most of them)."""
    if candidate.workers == 1:
        return 0.0, 0.0, "nothing"
    backward = cluster.compute.backward_share * pass_seconds
    priced = _priced_buckets(cluster, workload, candidate)
    end = 0.0
    for ready, seconds in priced.buckets:
        end = max(end, ready * backward) + seconds
    return max(0.0, end - backward), priced.seconds, priced.largest


@dataclass(frozen=True, slots=True)
class _PricedBuckets:
    """(ready, seconds) of every bucket, the seconds of all, what takes most of them, and the layers they are of."""

    buckets: tuple[tuple[float, float], ...]
    seconds: float
    largest: str
    layers: tuple[Layer, ...]


def _priced_buckets(cluster: Cluster, workload: Workload, candidate: Candidate) -> _PricedBuckets:
    """Prices depend on neither batch nor pass: they are kept with the cluster, by the identity of the layers."""
    name, grid, layers = candidate.algorithm, candidate.grid, workload.layers
    key = (name, grid.sizes, candidate.bucket_mb, workload.bytes_per_parameter, id(layers))
    if key not in cluster.kept:
        cut = fill_buckets(layers, workload.bytes_per_parameter, candidate.bucket_mb)
        prices = {size: price_all_reduce(cluster, name, grid, size) for size in {bucket.num_bytes for bucket in cut}}
        by_part: dict[str, float] = {}
        for bucket in cut:
            for part, seconds in prices[bucket.num_bytes].parts.items():
                by_part[part] = by_part.get(part, 0.0) + seconds
        times = tuple((bucket.ready, prices[bucket.num_bytes].seconds) for bucket in cut)
        largest = max(by_part, key=lambda part: by_part[part])
        # The layers are kept too, so that nothing else can have their identity.
        cluster.kept[key] = _PricedBuckets(times, sum(seconds for _, seconds in times), largest, layers)
    found = cluster.kept[key]
    assert isinstance(found, _PricedBuckets)
    return found


def step_deviation(
    cluster: Cluster, workload: Workload, candidate: Candidate, global_batch_size: int, fit: StepFit | None = None
) -> float:
    """Relative standard deviation of `step_time`: every uncertain number of the cluster, and the model's form."""
    here = step_time(cluster, workload, candidate, global_batch_size, fit)
    other_model = _OTHER_MODEL if _other_work(cluster, workload, fit) else 0.0
    squares = 0.0
    # A fit knows the step with the backend's own all-reduce; another's differs from it by what the links say.
    for knob in KNOBS if fit is None else (*NETWORK_KNOBS, "loader"):
        # Both ways, and as far as it may be: a loader that hardly binds may bind much more.
        if deviation := cluster.deviation(knob):
            changed = [_changed(cluster, knob, math.exp(sign * deviation)) for sign in (1, -1)]
            steps = [step_time(one, workload, candidate, global_batch_size, fit).seconds for one in changed]
            squares += max(abs(math.log(seconds / here.seconds)) for seconds in steps) ** 2
    rough = _ROUGH_COLLECTIVES * _rough_seconds(cluster, workload, candidate, here, fit) / here.seconds
    if fit is not None:
        nodes, passes = cluster.nodes_of(candidate.workers), round(here.local_batch / here.ghost_batch_size)
        of_fit = fit.deviation(here.ghost_batch_size, candidate.workers, nodes, passes)
        return combine(of_fit, math.sqrt(squares), rough, other_model)
    form = reach_deviation(_reach(cluster, candidate))
    return combine(math.sqrt(squares), form, cluster.compute.deviation(here.ghost_batch_size), other_model, rough)


def _changed(cluster: Cluster, knob: str, factor: float) -> Cluster:
    """`Cluster.changed`, kept: every candidate asks for the same ones, and they keep their prices."""
    key = ("changed", knob, factor)
    if key not in cluster.kept:
        cluster.kept[key] = cluster.changed(knob, factor)
    found = cluster.kept[key]
    assert isinstance(found, Cluster)
    return found


def step_warnings(
    cluster: Cluster, workload: Workload, candidate: Candidate, global_batch_size: int, fit: StepFit | None = None
) -> list[str]:
    """What makes the interval wide, for people."""
    here = step_time(cluster, workload, candidate, global_batch_size, fit)
    found = [text for text in (_other_work(cluster, workload, fit),) if text]
    if fit is not None:
        found += fit.warnings(here.ghost_batch_size, candidate.workers, cluster.nodes_of(candidate.workers))
    else:
        found += cluster.compute.warnings(here.ghost_batch_size)
        found += reach_warnings(_reach(cluster, candidate))
    if _rough_seconds(cluster, workload, candidate, here, fit) > 0.01 * here.seconds:
        found.append("the backend's own all-reduce is priced by a rough formula, the better of ring and tree")
    return found


def step_notes(cluster: Cluster, workload: Workload, candidate: Candidate, global_batch_size: int) -> list[str]:
    """What to know about a step that makes no interval wider."""
    found = []
    ghost = candidate.ghost_batch_size or ghost_of(cluster, workload, candidate.workers)
    if ghost != workload.ghost_batch_size:
        found.append(
            f"ghost batch {workload.ghost_batch_size} gives fewer ghosts than workers; {ghost} is used instead: "
            "batch-norm then sees other statistics than the recipe's"
        )
    idle = candidate.workers - global_batch_size // ghost
    if idle > 0:
        found.append(
            f"{idle:,} of {candidate.workers:,} workers have no ghost batch of {global_batch_size:,} images to take"
        )
    if global_batch_size > workload.num_train:
        found.append(
            f"a step of {global_batch_size:,} images is more than the whole set of {workload.num_train:,}: "
            "no such training is known to work"
        )
    return found


def _usually_exposed(cluster: Cluster, workload: Workload, workers: int, pass_seconds: float) -> float:
    """What the backend's own all-reduce leaves exposed with the usual buckets."""
    backend = Candidate(workers, "backend", GridShape((1, workers)), workload.bucket_mb)
    return exposed_seconds(cluster, workload, backend, pass_seconds)[0]


def _rough_seconds(
    cluster: Cluster, workload: Workload, candidate: Candidate, here: StepTime, fit: StepFit | None
) -> float:
    """Seconds of a step that come from the rough formula of a backend's tree.

    Without a fit those of the backend itself; with one, whose rows have the backend's own in them, those that another
    algorithm is compared with.
    """
    if cluster.collectives != "tree" or candidate.workers == 1:
        return 0.0
    if fit is None:
        return here.parts["exposed communication"] if candidate.algorithm == "backend" else 0.0
    if candidate.algorithm == "backend":
        return 0.0
    one_pass = cluster.compute.seconds(here.ghost_batch_size) * _work_factor(cluster, workload)
    return _usually_exposed(cluster, workload, candidate.workers, one_pass)


def _reach(cluster: Cluster, candidate: Candidate) -> Reach:
    """A cluster file knows one node; a calibration knows the world it was measured in."""
    if cluster.measured_here and cluster.measured_workers:
        known, what = cluster.measured_workers, "that computed at a time when steps were measured"
    elif cluster.calibration is not None:
        known, what = cluster.calibration.shape.world_size, "of the measured grid"
    elif cluster.measured_here:
        return Reach()
    else:
        known, what = cluster.workers_per_node, "of one node, which is what the cluster file knows"
    far = math.log2(candidate.workers / known)
    # Fewer workers than were measured share one machine's cores in another way, too.
    return Reach(workers=far if far > 0 or cluster.measured_here else 0.0, known_workers=f"{what} ({known:,})")


def _measured_network(cluster: Cluster, workload: Workload, fit: StepFit | None) -> tuple[str, int]:
    """The network whose steps are known, and the pixels a side of its images."""
    if fit is not None:
        return ROWS_OF
    return cluster.compute.model, cluster.compute.image_size or workload.image_size


def _work_factor(cluster: Cluster, workload: Workload, fit: StepFit | None = None) -> float:
    """Multiply-adds of an image over those of the measured network."""
    model, size = _measured_network(cluster, workload, fit)
    if model == workload.model:
        return (workload.image_size / size) ** 2
    if not workload.work:
        raise ConfigError(
            f"the step times of cluster '{cluster.name}' are of {model}, the recipe trains {workload.model}; "
            "measure it with `megabatch bench step` and give the file with --calibrate"
        )
    return workload.work / model_layers(model)[1] * (224 / size) ** 2


def _other_work(cluster: Cluster, workload: Workload, fit: StepFit | None) -> str:
    """How the measured network differs from the recipe's, in words; empty when it does not."""
    model, size = _measured_network(cluster, workload, fit)
    if model != workload.model:
        return f"step times are of {model}, scaled to {workload.model} by multiply-adds"
    if size != workload.image_size:
        return f"step times are of images of {size} pixels a side, scaled to {workload.image_size} by multiply-adds"
    return ""
