"""What is trained, as the planner sees it: gradient bytes by layer, images, batches, epochs, ghost batches.

The layer list of the ResNets is computed once from `megabatch.model.resnet` at 224 pixels and stored as
`data/layers.csv`; a test compares the two. Gradients become ready from the last layer to the first, each layer
taking its part of the multiply-adds out of the backward pass. DDP fills buckets in that order, each until it holds
`bucket_mb` of gradients as they are computed, in fp32, whatever they are sent as; the small first bucket that DDP has
by default is gone when a size is given, as the trainer gives it.

Ghost batches fall to the workers as in a run. A recipe's ghost batch stays while every worker gets at least one. With
more workers than ghosts it must shrink, to a divisor of every global batch: the next one above a worker's fair share or
the next below, whichever makes the shorter steps. Still smaller ones could balance the last images, but batch-norm
would pay for it. Workers that get no ghost are allowed: 67,840 images on 1,024 workers are 848 ghosts of 80, and 176
workers wait.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megabatch.config import Config
from megabatch.errors import ConfigError, nearest
from megabatch.plan.memory import LAYERS_FILE, Memory, estimate
from megabatch.recipes import load_config
from megabatch.schedule.batch import BatchStages, check_whole_ghosts, count_steps, parse_stages

IMAGENET_TRAIN, IMAGENET_VAL = 1_281_167, 50_000
_GRADIENT_BYTES = 4
"""Of one parameter as it is computed, and as DDP counts buckets."""
_KNOWN_SETS = {"fashion-mnist": (60_000, 10_000), "cifar10": (50_000, 10_000), "imagenette": (9_469, 3_925)}
_LEAST_GHOST = 2  # batch-norm needs a variance
_GRAD_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution with its norm, or the classifier; `work` is its part of the network's multiply-adds."""

    name: str
    parameters: int
    work: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together; `ready` is the part of the backward pass after which they exist."""

    num_bytes: int
    ready: float


@dataclass(frozen=True, slots=True)
class Branch:
    """A collapse that leaves the trunk at an epoch; global_batch_size 0 is that of the trunk there."""

    at_epoch: float
    epochs: float
    global_batch_size: int = 0


@dataclass(frozen=True)
class Workload:
    """One recipe. `bytes_per_parameter` on the wire; `work` is multiply-adds of one image (0: not known).

    stages: as they lie in a run of `epochs`, and stretched with it where a run is longer or shorter; `fixed_stages`
    stay where they are.
    """

    name: str
    model: str
    layers: tuple[Layer, ...]
    stages: BatchStages
    ghost_batch_size: int
    epochs: float
    num_train: int = IMAGENET_TRAIN
    num_val: int = IMAGENET_VAL
    bytes_per_parameter: int = 4
    work: float = 0.0
    evaluate_every_epochs: float = 1.0
    bucket_mb: float = 25.0
    branches: tuple[Branch, ...] = ()
    image_size: int = 224
    max_steps: int = 0
    fixed_stages: bool = False
    notes: tuple[str, ...] = ()
    memory: Memory | None = None  # of a worker, for the recipe's ghost batch; None: not known

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one whole gradient on the wire."""
        return sum(layer.parameters for layer in self.layers) * self.bytes_per_parameter

    @property
    def bucket_mb_of_all(self) -> float:
        """A bucket size that holds the whole gradient, in whole MB."""
        return float(math.ceil(sum(layer.parameters for layer in self.layers) * _GRADIENT_BYTES / 2**20) + 1)

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        """Every global batch of the trunk and its branches, rising."""
        of_branches = (self._total(branch, self.epochs) for branch in self.branches)
        return tuple(sorted({*self.stages.global_batch_sizes, *of_branches}))

    def with_batch(self, stages: BatchStages, ghost_batch_size: int | None = None, *, fixed: bool = True) -> Workload:
        """The same recipe at another global batch; its stages stay where they are given unless they are not `fixed`."""
        ghost = ghost_batch_size or self.ghost_batch_size
        return dataclasses.replace(self, stages=stages, ghost_batch_size=ghost, fixed_stages=fixed)

    def stages_over(self, epochs: float) -> BatchStages:
        """The stages of a run of so many epochs: where `megabatch train --epochs` puts them."""
        return self.stages if self.fixed_stages else self.stages.stretched(epochs / self.epochs)

    def steps_by_stage(self, epochs: float) -> list[tuple[int, int]]:
        """(global batch, steps) of each stage and then of each branch, for a trunk of so many epochs."""
        counts, before, stages = [], 0, self.stages_over(epochs)
        ends = [*(min(epochs, start) for start in stages.from_epochs[1:]), epochs]
        for index, (global_batch_size, end) in enumerate(zip(stages.global_batch_sizes, ends, strict=True), start=1):
            head = BatchStages(stages.from_epochs[:index], stages.global_batch_sizes[:index])
            total = count_steps(head, self.ghost_batch_size, self.num_train, max(0, round(end * self.num_train)))
            counts.append((global_batch_size, max(0, total - before)))
            before = max(before, total)
        stretched = epochs / self.epochs  # as `megabatch train --epochs` does
        for branch in self.branches:
            global_batch_size = self._total(branch, epochs)
            samples = round(branch.epochs * stretched * self.num_train)
            alone = BatchStages((0.0,), (global_batch_size,))
            counts.append((global_batch_size, count_steps(alone, self.ghost_batch_size, self.num_train, samples)))
        left, found = self.max_steps or math.inf, []
        for global_batch_size, number in counts:
            found.append((global_batch_size, int(min(number, left))))
            left -= found[-1][1]
        return found

    def _total(self, branch: Branch, epochs: float) -> int:
        return branch.global_batch_size or self.stages_over(epochs).at(branch.at_epoch * (epochs / self.epochs))


@cache
def model_layers(model: str) -> tuple[tuple[Layer, ...], float]:
    """The layers of a stored network and its multiply-adds per image; `ConfigError` when it is not stored."""
    with open(LAYERS_FILE, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    known = sorted({row["model"] for row in rows})
    if model not in known:
        raise ConfigError(
            f"no layer list is stored for network '{model}' (stored: {', '.join(known)}); measure it with "
            f"`megabatch bench step` and give the file with --calibrate{nearest(model, known)}"
        )
    mine = [row for row in rows if row["model"] == model]
    work = sum(int(row["multiply_adds"]) for row in mine)
    layers = tuple(Layer(row["layer"], int(row["parameters"]), int(row["multiply_adds"]) / work) for row in mine)
    return layers, float(work)


@cache
def fill_buckets(layers: tuple[Layer, ...], bytes_per_parameter: int, bucket_mb: float) -> tuple[Bucket, ...]:
    """Cut the gradient into buckets, last layer first; one bucket when `bucket_mb` is infinite."""
    most = bucket_mb * 2**20 / _GRADIENT_BYTES
    buckets: list[Bucket] = []
    filled, ready = 0, 0.0
    for layer in reversed(layers):
        ready += layer.work
        filled += layer.parameters
        if filled >= most:
            buckets.append(Bucket(filled * bytes_per_parameter, min(1.0, ready)))
            filled = 0
    if filled:
        buckets.append(Bucket(filled * bytes_per_parameter, 1.0))
    return tuple(buckets)


def busiest_passes(global_batch_size: int, ghost_batch_size: int, workers: int) -> int:
    """Ghost batches of the worker that has most of them."""
    return -(-(global_batch_size // ghost_batch_size) // workers)


def fitting_ghost(workload: Workload, workers: int, pass_seconds: Callable[[float], float]) -> int:
    """The ghost batch for so many workers; `pass_seconds` tells how long one of a size takes.

    Raises:
        ConfigError: a batch that is not made of whole ghosts, or too small for the workers.
    """
    totals = workload.global_batch_sizes
    check_whole_ghosts(
        BatchStages(tuple(float(i) for i in range(len(totals))), totals), workload.ghost_batch_size, "train."
    )
    if totals[0] // workload.ghost_batch_size >= workers:
        return workload.ghost_batch_size
    if totals[0] / workers < _LEAST_GHOST:
        raise ConfigError(
            f"global batch {totals[0]:,} on {workers:,} workers leaves {totals[0] / workers:.2g} images each; "
            f"at least {_LEAST_GHOST} are needed: ask for fewer workers or a larger batch"
        )
    common, share = math.gcd(*totals), totals[0] / workers
    sizes = [size for size in range(_LEAST_GHOST, workload.ghost_batch_size + 1) if common % size == 0]
    below = sum(size <= share for size in sizes)
    near = sizes[max(0, below - 1) : below + 1]

    def epoch_seconds(size: int) -> float:
        return sum(busiest_passes(total, size, workers) * pass_seconds(size) / total for total in totals)

    return min(near, key=lambda size: (epoch_seconds(size), -size))


def workload_of(
    recipe: str,
    overrides: list[str] | None = None,
    layers: tuple[Layer, ...] | None = None,
    *,
    scale: str | None = None,
    epochs: float | None = None,
) -> Workload:
    """The workload of a recipe, by name or file. `layers` replaces the stored list of its network."""
    config = load_config(recipe, overrides, scale=scale, epochs=epochs)
    return workload_from_config(config, Path(recipe).stem, layers)


def workload_from_config(config: Config, name: str, layers: tuple[Layer, ...] | None = None) -> Workload:
    """The workload of settings already read."""
    work = 0.0
    if layers is None:
        layers, work = model_layers(config.model.label)
        work *= (config.data.image_size / 224) ** 2
    num_train, num_val = _num_images(config)
    collapse, adaptive = config.collapse, config.batch_control and config.batch_control.adaptive
    of_collapse = (collapse.epochs, collapse.global_batch_size or 0) if collapse else (0.0, 0)
    note = "the batch may grow by itself (batch_control.adaptive); the stages are priced as they stand"
    return Workload(
        name=name,
        model=config.model.label,
        layers=layers,
        stages=parse_stages(config.train.global_batch_size),
        ghost_batch_size=config.train.ghost_batch_size,
        epochs=config.train.epochs,
        num_train=num_train,
        num_val=num_val,
        bytes_per_parameter=_GRAD_BYTES[config.comm.grad_dtype],
        work=work,
        evaluate_every_epochs=config.train.evaluate_every_epochs or config.train.epochs,
        bucket_mb=config.comm.bucket_mb,
        branches=tuple(Branch(at, *of_collapse) for at in (collapse.at_epochs if collapse else ())),
        image_size=config.data.image_size,
        max_steps=config.train.max_steps,
        notes=(note,) if adaptive else (),
        memory=estimate(config),
    )


def _num_images(config: Config) -> tuple[int, int]:
    """Images to train on and to evaluate; a part of the set where the recipe takes a part."""
    generated, held_out = config.data.generated, config.data.held_out_images
    known = {**_KNOWN_SETS, "generated": (generated.num_train, generated.num_val)}
    of_recipe = (config.reference.images or IMAGENET_TRAIN, IMAGENET_VAL)
    num_train, num_val = known.get(config.data.source, of_recipe)
    num_train = min(config.data.max_train_images or num_train, num_train - held_out)
    if num_train < 1:
        raise ConfigError(f"data.held_out_images {held_out:,} leaves nothing to train on; hold out fewer")
    return num_train, held_out or num_val
