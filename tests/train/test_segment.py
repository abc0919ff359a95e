"""What a phase is trained with: images, rates and steps of the trunk and of a branch."""

from __future__ import annotations

import pytest

from megabatch.config import Config
from megabatch.data.augment import Augmentation
from megabatch.errors import ConfigError
from megabatch.schedule.clock import Clock
from megabatch.schedule.phases import branch_seed
from megabatch.schedule.pieces import value_at
from megabatch.train.segment import branch_clock, phases_of, planned_samples, segment_of, trunk_clock
from tests.system.runs import small_config

COLLAPSE = ("collapse.at_epochs=[1.0, 4.0]", "collapse.epochs=2.0")


def config_of(*overrides: str) -> Config:
    return small_config("train.global_batch_size=0:40 0.6:48 3:80", *COLLAPSE, *overrides)


def test_the_trunk_makes_the_same_steps_with_and_without_cuts() -> None:
    cut, whole = (
        config_of("train.reset_momentum_at_epochs=[0.25, 1.0]"),
        small_config("train.global_batch_size=0:40 0.6:48 3:80"),
    )
    clock, found = trunk_clock(cut, 330), []
    for phase in phases_of(cut):
        if phase.is_branch:
            continue
        segment = segment_of(cut, phase, clock, None)
        for step in segment.steps(cut, clock):
            assert not segment.is_over(clock, 8)
            found.append(step)
            clock = clock.after(step.num_samples)
        assert segment.is_over(clock, 8)
        assert clock.epoch >= min(phase.until_epoch, 4.0 - 8 / 330)
    [phase] = phases_of(whole)
    assert found == list(segment_of(whole, phase, trunk_clock(whole, 330), None).steps(whole, trunk_clock(whole, 330)))


def test_a_branch_has_its_own_clock_seed_and_batch() -> None:
    config = config_of()
    trunk = Clock(330, 1320, 345, 8)
    branch = phases_of(config)[1]
    clock = branch_clock(config, trunk)
    assert (clock.samples, clock.total_samples, clock.steps) == (0, 660, 8)
    segment = segment_of(config, branch, trunk, None)
    assert segment.seed == branch_seed(0, 1) != 0
    steps = list(segment.steps(config, clock))
    assert [step.num_samples for step in steps] == [48] * 13 + [32]  # the stage of the trunk where it begins
    assert (steps[0].index, steps[0].start_epoch) == (8, 0.0)
    assert planned_samples(config, 330) == 1320 + 2 * 660
    other = segment_of(config_of("collapse.global_batch_size=16"), branch, trunk, None)
    assert next(other.steps(config, clock)).num_samples == 16


def test_rates_of_a_branch_start_where_the_trunk_is() -> None:
    overrides = ("optimizer.lr=[{until_epoch=4, shape='linear', start=0.4, end=0.0}]",)
    trunk = Clock(330, 1320, 345, 8)
    config = config_of(*overrides)
    optimizer = segment_of(config, phases_of(config)[1], trunk, None).optimizer
    begin = 0.4 * (1 - 345 / 330 / 4)
    assert value_at(optimizer.lr, 0.0) == pytest.approx(begin)
    assert value_at(optimizer.lr, 1.0) == pytest.approx(begin / 4)  # power 2, half way
    assert value_at(optimizer.lr, 2.0) == 0.0
    assert value_at(optimizer.weight_decay, 1.0) == 5e-4
    assert value_at(optimizer.momentum, 1.0) == 0.9
    # 48 instead of the first stage's 40: a rule that keeps the noise has raised the trunk's rate by then.
    kept = config_of(*overrides, "batch_control.noise=lr")
    optimizer = segment_of(kept, phases_of(kept)[1], trunk, None).optimizer
    assert value_at(optimizer.lr, 0.0) == pytest.approx(1.2 * begin)
    own = config_of(*overrides, "collapse.lr=0.05", "collapse.momentum=0.5", "collapse.weight_decay=2e-4")
    optimizer = segment_of(own, phases_of(own)[1], trunk, None).optimizer
    assert (optimizer.lr, optimizer.momentum, optimizer.weight_decay) == (0.05, 0.5, 2e-4)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), Augmentation(crop="pad", padding=2, flip=True)),
        (("collapse.augment=off",), Augmentation()),
        (
            ("collapse.augment=same", "data.augment.area_min=0.5"),
            Augmentation(crop="pad", padding=2, flip=True, area_min=0.5),
        ),
    ],
)
def test_augmentation_of_a_branch(overrides: tuple[str, ...], expected: Augmentation) -> None:
    config = config_of(*overrides)
    assert segment_of(config, phases_of(config)[1], Clock(330, 1320, 345, 8), None).augmentation == expected


def test_a_plain_branch_of_resized_crops_changes_neither_scale_nor_shape() -> None:
    config = config_of("data.augment.crop=resized")
    found = segment_of(config, phases_of(config)[1], Clock(330, 1320, 345, 8), None).augmentation
    assert found == Augmentation(crop="resized", flip=True, side_share=7 / 8)


def test_a_collapse_shorter_than_a_ghost_batch_size_is_refused() -> None:
    config = small_config("collapse.at_epochs=[1]", "collapse.epochs=0.01")
    with pytest.raises(ConfigError, match=r"collapse.epochs 0.01 of 330 images is 3, a ghost batch needs 8"):
        planned_samples(config, 330)
