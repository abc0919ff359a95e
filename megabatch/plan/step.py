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
from megabatch.plan.compute import empirical_maximum, expected_maximum
from megabatch.plan.fit import StepFit
from megabatch.plan.quantity import Reach
from megabatch.plan.workload import Layer, Workload, busiest_passes, fill_buckets, fitting_ghost, model_layers

_ROWS_OF = ("resnet50", 224)
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

    @property
    def efficiency(self) -> float:
        """One worker alone, on the same images, over this."""
        return self.parts["compute"] / self.seconds


@dataclass(frozen=True, slots=True)
class PricedBuckets:
    """(ready, seconds) of every bucket, the seconds of all, and what takes most of them."""

    buckets: tuple[tuple[float, float], ...]
    seconds: float
    largest: str


class Prices:
    """What the gradients of one network cost on one cluster; prices depend on neither batch nor pass and are cached."""

    def __init__(self, cluster: Cluster, layers: tuple[Layer, ...], bytes_per_parameter: int) -> None:
        self.cluster, self._layers, self._bytes_per_parameter = cluster, layers, bytes_per_parameter
        self._buckets: dict[tuple[str, tuple[int, ...], float], PricedBuckets] = {}
        self._changed: dict[tuple[str, float], Prices] = {}

    def buckets(self, algorithm: str, grid: GridShape, bucket_mb: float) -> PricedBuckets:
        """The buckets of a gradient, each with its all-reduce."""
        key = (algorithm, grid.sizes, bucket_mb)
        if key not in self._buckets:
            cut = fill_buckets(self._layers, self._bytes_per_parameter, bucket_mb)
            sizes = {bucket.num_bytes for bucket in cut}
            prices = {size: self.cluster.all_reduce(algorithm, grid, size) for size in sizes}
            by_part: dict[str, float] = {}
            for bucket in cut:
                for part, seconds in prices[bucket.num_bytes].parts.items():
                    by_part[part] = by_part.get(part, 0.0) + seconds
            times = tuple((bucket.ready, prices[bucket.num_bytes].seconds) for bucket in cut)
            largest = max(by_part, key=lambda part: by_part[part])
            self._buckets[key] = PricedBuckets(times, sum(seconds for _, seconds in times), largest)
        return self._buckets[key]

    def changed(self, knob: str, factor: float) -> Prices:
        """On the cluster with one thing `factor` times as large: every candidate asks for the same ones."""
        key = (knob, factor)
        if key not in self._changed:
            changed = self.cluster.changed(knob, factor)
            self._changed[key] = Prices(changed, self._layers, self._bytes_per_parameter)
        return self._changed[key]


class StepModel:
    """Steps of one workload on one cluster, with a fit to rows of systems instead of the cluster's own step."""

    def __init__(self, prices: Prices, workload: Workload, fit: StepFit | None = None) -> None:
        self.prices, self.cluster, self.workload, self.fit = prices, prices.cluster, workload, fit

    def ghost_batch_size(self, workers: int) -> int:
        """The ghost batch of a plan for so many workers."""
        pass_seconds = self.fit.pass_seconds if self.fit else self.cluster.compute.seconds
        return fitting_ghost(self.workload, workers, pass_seconds)

    def time(self, candidate: Candidate, global_batch_size: int) -> StepTime:
        """Seconds of one step of `global_batch_size` images.

        Raises:
            ConfigError: too few images for the workers, or a network the cluster's step times say nothing about.
        """
        cluster, workers = self.cluster, candidate.workers
        ghost = candidate.ghost_batch_size or self.ghost_batch_size(workers)
        passes, nodes = busiest_passes(global_batch_size, ghost, workers), cluster.nodes_of(workers)
        one_pass = self._pass_seconds(ghost)
        exposed, communication, link = self.exposed(candidate, one_pass)
        if self.fit is not None:
            parts = self.fit.parts(ghost, workers, nodes, passes, self._work_factor(*_ROWS_OF))
            # The rows have the backend's own all-reduce in them; another counts by how much more or less it exposes.
            more = exposed - self._usually_exposed(workers, one_pass)
            parts["exposed communication"] = max(0.0, parts["exposed communication"] + more)
        else:
            compute = passes * one_pass
            parts = {"compute": compute, "exposed communication": exposed, "stragglers": self._wait(compute, workers)}
        rate = cluster.loader_images_per_second
        loader = global_batch_size / nodes / rate.value if rate else 0.0
        parts["loader"] = max(0.0, loader - parts["compute"] - parts["exposed communication"])
        seconds = sum(parts.values())
        if not math.isfinite(seconds) or seconds <= 0:
            raise ConfigError(
                f"the step comes out as {seconds} s, which cannot be; check the numbers of '{cluster.name}'"
            )
        largest = max(parts, key=lambda name: parts[name])
        largest = link if largest == "exposed communication" else largest
        return StepTime(seconds, parts, communication, passes * ghost, ghost, largest)

    def _wait(self, compute: float, workers: int) -> float:
        """What all wait for the slowest of the workers, by the cluster's law or its measured times."""
        cluster = self.cluster
        if cluster.straggler_ratios:
            middle = statistics.fmean(cluster.straggler_ratios)
            return compute * (empirical_maximum(cluster.straggler_ratios, workers) - middle)
        scatter = math.hypot(cluster.straggler_deviation.value * compute, cluster.jitter_seconds.value)
        return scatter * expected_maximum(workers)

    def exposed(self, candidate: Candidate, pass_seconds: float) -> tuple[float, float, str]:
        """(seconds left when the backward pass ends, seconds of all buckets, what takes most of them)."""
        if candidate.workers == 1:
            return 0.0, 0.0, "nothing"
        backward = self.cluster.compute.backward_share * pass_seconds
        priced = self.prices.buckets(candidate.algorithm, candidate.grid, candidate.bucket_mb)
        end = 0.0
        for ready, seconds in priced.buckets:
            end = max(end, ready * backward) + seconds
        return max(0.0, end - backward), priced.seconds, priced.largest

    def deviation(self, candidate: Candidate, global_batch_size: int) -> float:
        """Relative standard deviation of `time`: every uncertain number of the cluster, and the model's form."""
        here, squares = self.time(candidate, global_batch_size), 0.0
        # A fit knows the step with the backend's own all-reduce; another's differs from it by what the links say.
        for knob in KNOBS if self.fit is None else (*NETWORK_KNOBS, "loader"):
            # Both ways, and as far as it may be: a loader that hardly binds may bind much more.
            if deviation := self.cluster.deviation(knob):
                prices = [self.prices.changed(knob, math.exp(sign * deviation)) for sign in (1, -1)]
                models = [StepModel(one, self.workload, self.fit) for one in prices]
                steps = [one.time(candidate, global_batch_size).seconds for one in models]
                squares += max(abs(math.log(seconds / here.seconds)) for seconds in steps) ** 2
        rough = _ROUGH_COLLECTIVES * self._rough_seconds(candidate, here) / here.seconds
        other_model = _OTHER_MODEL if self._other_work else 0.0
        if self.fit is not None:
            nodes, passes = self.cluster.nodes_of(candidate.workers), round(here.local_batch / here.ghost_batch_size)
            of_fit = self.fit.deviation(here.ghost_batch_size, candidate.workers, nodes, passes)
            return math.hypot(of_fit, math.sqrt(squares), rough, other_model)
        form, table = self._reach(candidate).deviation, self.cluster.compute.deviation(here.ghost_batch_size)
        return math.hypot(math.sqrt(squares), form, table, other_model, rough)

    def warnings(self, candidate: Candidate, global_batch_size: int) -> list[str]:
        """What makes the interval wide, for people."""
        here = self.time(candidate, global_batch_size)
        found = [self._other_work] if self._other_work else []
        if self.fit is not None:
            nodes = self.cluster.nodes_of(candidate.workers)
            found += self.fit.warnings(here.ghost_batch_size, candidate.workers, nodes)
        else:
            found += self.cluster.compute.warnings(here.ghost_batch_size) + self._reach(candidate).warnings
        if self._rough_seconds(candidate, here) > 0.01 * here.seconds:
            found.append("the backend's own all-reduce is priced by a rough formula, the better of ring and tree")
        return found

    def notes(self, candidate: Candidate, global_batch_size: int) -> list[str]:
        """What to know about a step that makes no interval wider."""
        found, workload = [], self.workload
        ghost = candidate.ghost_batch_size or self.ghost_batch_size(candidate.workers)
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

    def _pass_seconds(self, ghost_batch_size: int) -> float:
        """What one worker computes for one ghost batch, by the cluster's table."""
        return self.cluster.compute.seconds(ghost_batch_size) * self._work_factor(*self._of_table)

    def _usually_exposed(self, workers: int, pass_seconds: float) -> float:
        """What the backend's own all-reduce leaves exposed with the usual buckets."""
        backend = Candidate(workers, "backend", GridShape((1, workers)), self.workload.bucket_mb)
        return self.exposed(backend, pass_seconds)[0]

    def _rough_seconds(self, candidate: Candidate, here: StepTime) -> float:
        """Seconds of a step that come from the rough formula of a backend's tree.

        Without a fit those of the backend itself; with one, whose rows have the backend's own in them, those that
        another algorithm is compared with.
        """
        of_backend, fitted = candidate.algorithm == "backend", self.fit is not None
        if self.cluster.collectives != "tree" or candidate.workers == 1 or of_backend == fitted:
            return 0.0
        if of_backend:
            return here.parts["exposed communication"]
        return self._usually_exposed(candidate.workers, self._pass_seconds(here.ghost_batch_size))

    def _reach(self, candidate: Candidate) -> Reach:
        """A cluster file knows one node; a calibration knows the world it was measured in."""
        cluster = self.cluster
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

    @property
    def _of_table(self) -> tuple[str, int]:
        """The network of the cluster's step times, and the pixels a side of its images."""
        return self.cluster.compute.model, self.cluster.compute.image_size or self.workload.image_size

    def _work_factor(self, model: str, size: int) -> float:
        """Multiply-adds of an image over those of a measured network."""
        workload = self.workload
        if model == workload.model:
            return (workload.image_size / size) ** 2
        if not workload.work:
            raise ConfigError(
                f"the step times of cluster '{self.cluster.name}' are of {model}, the recipe trains {workload.model}; "
                "measure it with `megabatch bench step` and give the file with --calibrate"
            )
        return workload.work / model_layers(model)[1] * (224 / size) ** 2

    @property
    def _other_work(self) -> str:
        """How the measured network differs from the recipe's, in words; empty when it does not."""
        model, size = _ROWS_OF if self.fit is not None else self._of_table
        if model != self.workload.model:
            return f"step times are of {model}, scaled to {self.workload.model} by multiply-adds"
        if size != self.workload.image_size:
            wanted = self.workload.image_size
            return f"step times are of images of {size} pixels a side, scaled to {wanted} by multiply-adds"
        return ""
