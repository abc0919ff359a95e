"""The phases of a run: one trunk, and side branches that collapse it (Codreanu 2017, "final collapse").

    trunk     0 ------- 37 ------- 52 ------- 67
                        |          |          |
    branches            1 --- 42   2 --- 57   3 --- 72      each starts from the trunk's weights; the trunk goes on from
                                                            where the branch left it, not from where the branch ended

The trunk is cut where a branch leaves it and where its momentum is reset. A cut lies between steps: before the first
step that starts at or after its epoch, so branches change nothing about the trunk's own steps. A branch has a clock
of its own that starts at 0, and images in an order of its own (`branch_seed`): each image once per epoch of the
branch, whatever part of an epoch the trunk had seen.

What is due after a step of a phase follows from the clock before and after it (`evaluation_is_due` and the like).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import islice

from megabatch.config import Config
from megabatch.config.data import AugmentConfig
from megabatch.config.optimizer import OptimizerConfig
from megabatch.errors import ConfigError
from megabatch.schedule.adaptive import AdaptiveBatch
from megabatch.schedule.batch import Step, iterate_steps, parse_stages
from megabatch.schedule.clock import Clock
from megabatch.schedule.control import BatchControl
from megabatch.schedule.noise import keep_noise
from megabatch.schedule.pieces import Piece, value_at


@dataclass(frozen=True)
class TrainingPhase:
    """A stretch of the trunk, or a branch: what is trained, and how. Epochs are those of its own clock."""

    number: int  # place in the list of phases
    member: int  # the branch's number from 1 on; 0 on the trunk
    epochs: float  # length of its clock: of the whole trunk, or of the branch
    until_epoch: float  # steps that start there or later belong to the next phase
    reset_momentum: bool  # when it begins
    seed: int  # of sample order, augmentation and dropout
    augment: AugmentConfig
    optimizer: OptimizerConfig  # of a branch: the trunk's, until `resolved`
    global_batch_size: int | str  # likewise

    @property
    def is_branch(self) -> bool:
        return self.member > 0

    @property
    def name(self) -> str:
        return f"collapse-{self.member}" if self.member else "trunk"


class Ending(Enum):
    """How a phase came to its end."""

    OVER = "over"  # the next phase can begin
    RESTART = "restart"  # go on with a new loader: an exact sum did not fit, or others take part
    LIMIT = "limit"  # train.max_steps
    STOPPED = "stopped"  # a signal


def phases_of(config: Config) -> tuple[TrainingPhase, ...]:
    """The phases that a recipe describes, in the order in which they are run."""
    train, collapse = config.train, config.collapse
    # A recipe stretched over other epochs may end a rounding error away from its last branch.
    branches_at = [min(epoch, train.epochs) for epoch in (collapse.at_epochs if collapse else ())]
    trunk = TrainingPhase(
        number=0,
        member=0,
        epochs=train.epochs,
        until_epoch=train.epochs,
        reset_momentum=False,
        seed=train.seed,
        augment=config.data.augment,
        optimizer=config.optimizer,
        global_batch_size=train.global_batch_size,
    )
    phases: list[TrainingPhase] = []
    reset = False
    for epoch in sorted({*branches_at, *train.reset_momentum_at_epochs, train.epochs}):
        phases.append(replace(trunk, number=len(phases), until_epoch=epoch, reset_momentum=reset))
        if collapse and epoch in branches_at:
            member = 1 + branches_at.index(epoch)
            branch = replace(
                trunk,
                number=len(phases),
                member=member,
                epochs=collapse.epochs,
                until_epoch=collapse.epochs,
                reset_momentum=collapse.reset_momentum,
                seed=branch_seed(train.seed, member),
                augment=branch_augment(config),
            )
            phases.append(branch)
        reset = epoch in train.reset_momentum_at_epochs
    return tuple(phases)


def resolved(
    phase: TrainingPhase, config: Config, trunk: Clock, measured_batch_size: int | None = None
) -> TrainingPhase:
    """The phase as it is trained, once it is known where the trunk stands when a branch leaves it.

    What the recipe does not say about a branch is as on the trunk there; its lr then falls to 0 with power 2.
    measured_batch_size: the trunk's batch there, when it follows the noise scale.
    """
    collapse = config.collapse
    if not phase.is_branch or collapse is None:
        return phase
    stages = parse_stages(config.train.global_batch_size)
    batch_there = measured_batch_size or stages.at(trunk.epoch)
    there = config.optimizer
    lr, momentum = keep_noise(
        config.batch_control.noise_rule,
        value_at(there.lr, trunk.epoch),
        value_at(there.momentum, trunk.epoch),
        batch_there / stages.global_batch_sizes[0],
    )
    falling = (Piece(until_epoch=collapse.epochs, shape="polynomial", start=lr, end=0.0, power=2.0),)
    decay = value_at(there.weight_decay, trunk.epoch)
    optimizer = there.model_copy(
        update={
            "lr": falling if collapse.lr is None else collapse.lr,
            "momentum": momentum if collapse.momentum is None else collapse.momentum,
            "weight_decay": decay if collapse.weight_decay is None else collapse.weight_decay,
        }
    )
    return replace(phase, optimizer=optimizer, global_batch_size=collapse.global_batch_size or batch_there)


def control_of(
    config: Config,
    phase: TrainingPhase,
    clock: Clock,
    rank: int = 0,
    world_size: int = 1,
    adaptive: AdaptiveBatch | None = None,
) -> BatchControl:
    """The steps that are left of a phase, or up to `train.max_steps` of the run."""
    control = BatchControl(
        adaptive if adaptive and not phase.is_branch else phase.global_batch_size,
        ghost_batch_size=config.train.ghost_batch_size,
        samples_per_epoch=clock.samples_per_epoch,
        epochs=phase.epochs,
        rank=rank,
        world_size=world_size,
        noise_rule=config.batch_control.noise_rule,
        until_epoch=phase.until_epoch if phase.until_epoch < phase.epochs else math.inf,
        max_steps=config.train.max_steps,
    )
    control.load_state_dict(asdict(clock))
    return control


def start_clock(config: Config, phase: TrainingPhase, num_images: int, steps: int = 0) -> Clock:
    """The clock of a phase at its start; `steps` of the run lie behind it."""
    total_samples, needed = round(phase.epochs * num_images), config.train.ghost_batch_size
    if total_samples < needed:
        name = "collapse.epochs" if phase.is_branch else "train.epochs"
        raise ConfigError(
            f"{name} {phase.epochs:g} of {num_images} images is {total_samples}, a ghost batch needs "
            f"{needed}; give at least {needed / num_images:.4g} epochs"
        )
    return Clock(num_images, total_samples, steps=steps)


def planned_samples(config: Config, num_images: int) -> int:
    """The images of all phases together, for the progress bar; of a plain run no more than `train.max_steps` make."""
    trunk, *others = phases_of(config)
    branches = [phase for phase in others if phase.is_branch]
    whole = sum(start_clock(config, phase, num_images).total_samples for phase in (trunk, *branches))
    if not config.train.max_steps or branches or config.batch_control.adaptive:
        return whole
    clock = start_clock(config, trunk, num_images)
    stages = parse_stages(config.train.global_batch_size)
    steps = iterate_steps(stages.at, config.train.ghost_batch_size, clock.samples_per_epoch, clock.total_samples)
    return sum(step.num_samples for step in islice(steps, config.train.max_steps))


def branch_seed(seed: int, member: int) -> int:
    """The key of a branch's sample order, augmentation and dropout."""
    digest = hashlib.sha256(f"megabatch branch {member} of seed {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


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


def evaluation_is_due(config: Config, before: Clock, after: Clock) -> bool:
    return after.crosses(before, config.train.evaluate_every_epochs)


def checkpoint_is_due(config: Config, before: Clock, after: Clock) -> bool:
    settings = config.checkpoint
    by_steps = bool(settings.every_steps) and after.steps % settings.every_steps == 0
    return by_steps or after.crosses(before, settings.every_epochs)


def digest_is_due(config: Config, after: Clock) -> bool:
    every = config.train.digest_every_steps
    return bool(every) and after.steps % every == 0


def audit_is_due(config: Config, step: Step) -> bool:
    every = config.train.audit_every_steps
    return bool(every) and (step.index + 1) % every == 0


def weights_are_needed(config: Config, clock: Clock, step: Step) -> bool:
    """Whether something looks at the weights after this step, before another changes them.

    clock: of the step's phase, where it is now.
    """
    before = replace(clock, samples=step.start_samples, steps=step.index)
    after = before.after(step.num_samples)
    is_due = evaluation_is_due(config, before, after) or checkpoint_is_due(config, before, after)
    return step.is_last or is_due or digest_is_due(config, after)
