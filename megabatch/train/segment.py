"""A phase made ready to run: its images, rates and steps. The trunk and its branches differ in nothing else."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megabatch.config import Config
from megabatch.config.collapse import CollapseConfig
from megabatch.config.data import AugmentConfig
from megabatch.config.optimizer import OptimizerConfig
from megabatch.data.augment import Augmentation
from megabatch.errors import ConfigError
from megabatch.schedule.adaptive import AdaptiveBatch
from megabatch.schedule.batch import Step, first_sample, iterate_steps, parse_stages
from megabatch.schedule.clock import Clock
from megabatch.schedule.control import keep_noise
from megabatch.schedule.phases import Phase, branch_seed, plan_phases
from megabatch.schedule.pieces import Piece, value_at

__all__ = ["Segment", "branch_augment", "branch_clock", "phases_of", "planned_samples", "segment_of", "trunk_clock"]


@dataclass(frozen=True)
class Segment:
    """How a phase is trained. Epochs are those of its own clock."""

    phase: Phase
    seed: int  # of sample order, augmentation and dropout
    augmentation: Augmentation
    optimizer: OptimizerConfig
    base_global_batch_size: int  # the batch that the rates are made for
    until_samples: int  # steps that start here or later belong to the next phase
    global_batch_size_at: Callable[[float], int]

    def steps(self, config: Config, clock: Clock) -> Iterator[Step]:
        """What is left to do of the phase, or up to `max_steps` of the run."""
        steps = iterate_steps(
            self.global_batch_size_at,
            config.train.ghost_batch_size,
            clock.samples_per_epoch,
            clock.total_samples,
            start_samples=clock.samples,
            start_index=clock.steps,
            until_samples=self.until_samples,
        )
        limit = config.train.max_steps
        return itertools.islice(steps, max(0, limit - clock.steps)) if limit else steps

    def is_over(self, clock: Clock, ghost_batch_size: int) -> bool:
        """Whether the phase has no step left at this point of its clock."""
        return clock.samples >= self.until_samples or clock.total_samples - clock.samples < ghost_batch_size


def phases_of(config: Config) -> tuple[Phase, ...]:
    """The phases of the run that a recipe describes."""
    collapse = config.collapse
    return plan_phases(
        config.train.epochs,
        collapse.at_epochs if collapse else (),
        collapse.epochs if collapse else 0.0,
        config.train.reset_momentum_at_epochs,
        collapse.reset_momentum if collapse else True,
    )


def trunk_clock(config: Config, num_images: int) -> Clock:
    """The trunk's clock at its start."""
    return Clock(num_images, _total_samples(config, config.train.epochs, num_images, "train.epochs"))


def branch_clock(config: Config, trunk: Clock) -> Clock:
    """The clock of a branch at its start; steps are counted on."""
    assert config.collapse is not None
    total = _total_samples(config, config.collapse.epochs, trunk.samples_per_epoch, "collapse.epochs")
    return Clock(trunk.samples_per_epoch, total, steps=trunk.steps)


def planned_samples(config: Config, num_images: int) -> int:
    """The images of all phases together, for the progress bar."""
    trunk = trunk_clock(config, num_images)
    num_branches = len(config.collapse.at_epochs) if config.collapse else 0
    return trunk.total_samples + (num_branches * branch_clock(config, trunk).total_samples if num_branches else 0)


def segment_of(config: Config, phase: Phase, trunk: Clock, adaptive: AdaptiveBatch | None) -> Segment:
    """Prepare a phase; `trunk` is where the trunk stands when it begins or is resumed."""
    stages = parse_stages(config.train.global_batch_size)
    first = stages.global_batch_sizes[0]
    seed = branch_seed(config.train.seed, phase.member)
    if phase.is_branch:
        assert config.collapse is not None
        now = adaptive.at(adaptive.observed) if adaptive else stages.at(trunk.epoch)
        global_batch_size = config.collapse.global_batch_size or now
        augmentation = Augmentation(**branch_augment(config).model_dump())
        optimizer = _branch_optimizer(config, config.collapse, trunk.epoch, now / first)
        return Segment(
            phase, seed, augmentation, optimizer, global_batch_size, sys.maxsize, lambda epoch: global_batch_size
        )
    is_whole_rest = phase.until_epoch >= config.train.epochs
    until = sys.maxsize if is_whole_rest else first_sample(phase.until_epoch, trunk.samples_per_epoch)
    global_batch_size_at = _follow(adaptive) if adaptive else stages.at
    augmentation = Augmentation(**config.data.augment.model_dump())
    return Segment(phase, seed, augmentation, config.optimizer, first, until, global_batch_size_at)


def _total_samples(config: Config, epochs: float, num_images: int, name: str) -> int:
    total_samples = round(epochs * num_images)
    if total_samples < config.train.ghost_batch_size:
        raise ConfigError(
            f"{name} {epochs:g} of {num_images} images is {total_samples}, a ghost batch needs "
            f"{config.train.ghost_batch_size}; give at least {config.train.ghost_batch_size / num_images:.4g} epochs"
        )
    return total_samples


def _follow(adaptive: AdaptiveBatch) -> Callable[[float], int]:
    """The batches of the steps to come, one after the other."""
    numbers = itertools.count(adaptive.observed)
    return lambda epoch: adaptive.wait_for(next(numbers))


def _branch_optimizer(config: Config, collapse: CollapseConfig, epoch: float, growth: float) -> OptimizerConfig:
    """The branch's schedules: what the recipe gives for it, else what the trunk has where the branch begins."""
    trunk = config.optimizer
    begin, momentum = keep_noise(
        config.batch_control.noise, value_at(trunk.lr, epoch), value_at(trunk.momentum, epoch), growth
    )
    falling = (Piece(until_epoch=collapse.epochs, shape="polynomial", start=begin, end=0.0, power=2.0),)
    decay = value_at(trunk.weight_decay, epoch)
    return trunk.model_copy(
        update={
            "lr": falling if collapse.lr is None else collapse.lr,
            "momentum": momentum if collapse.momentum is None else collapse.momentum,
            "weight_decay": decay if collapse.weight_decay is None else collapse.weight_decay,
        }
    )


def branch_augment(config: Config) -> AugmentConfig:
    """`plain` keeps random crops and flips but no change of scale or shape (Codreanu's resized image, crop, mirror)."""
    trunk, kind = config.data.augment, config.collapse.augment if config.collapse else "same"
    if kind == "same":
        return trunk
    if kind == "off":
        return AugmentConfig()
    if trunk.crop != "resized":
        return AugmentConfig(crop=trunk.crop, padding=trunk.padding, flip=trunk.flip)
    # 224 out of 256 on the shorter side, as evaluation sees it, at a random place.
    return AugmentConfig(crop="resized", flip=trunk.flip, side_share=7 / 8)
