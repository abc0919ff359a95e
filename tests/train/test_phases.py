"""How a run is cut into trunk and branches, and what each is trained with: images, values and steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megabatch.config import Config
from megabatch.config.data import AugmentConfig
from megabatch.errors import ConfigError
from megabatch.schedule.batch import Step
from megabatch.schedule.clock import Clock
from megabatch.schedule.pieces import value_at
from megabatch.train.phases import (
    branch_seed,
    checkpoint_is_due,
    control_of,
    digest_is_due,
    evaluation_is_due,
    phases_of,
    planned_samples,
    resolved,
    start_clock,
    weights_are_needed,
)
from tests.system.runs import small_config

COLLAPSE = ("collapse.at_epochs=[1.0, 4.0]", "collapse.epochs=2.0")
TRUNK = Clock(330, 1320, 345, 8)  # where the first branch of the recipe below leaves it


def config_of(*overrides: str) -> Config:
    return small_config("train.global_batch_size=0:40 0.6:48 3:80", *COLLAPSE, *overrides)


def test_a_run_without_branches_is_one_phase() -> None:
    [phase] = phases_of(small_config())
    assert (phase.number, phase.name, phase.until_epoch, phase.reset_momentum) == (0, "trunk", 4.0, False)


def test_codreanus_cycles() -> None:
    """Phases end at 25, 37, 52 and 67, momentum starts anew in each, and a branch leaves at the end of each cycle."""
    phases = phases_of(
        small_config(
            "train.epochs=67",
            "train.reset_momentum_at_epochs=[25, 37, 52]",
            "collapse.at_epochs=[37, 52, 67]",
            "collapse.epochs=5",
        )
    )
    assert [(p.name, p.until_epoch, p.reset_momentum) for p in phases] == [
        ("trunk", 25.0, False),
        ("trunk", 37.0, True),
        ("collapse-1", 5.0, True),
        ("trunk", 52.0, True),
        ("collapse-2", 5.0, True),
        ("trunk", 67.0, True),
        ("collapse-3", 5.0, True),
    ]
    assert [p.number for p in phases] == list(range(7))
    assert [p.is_branch for p in phases] == [False, False, True, False, True, False, True]


def test_a_branch_before_the_end_lets_the_trunk_go_on() -> None:
    phases = phases_of(small_config("collapse.at_epochs=[1.5]", "collapse.epochs=2", "collapse.reset_momentum=false"))
    assert [(p.name, p.until_epoch, p.reset_momentum) for p in phases] == [
        ("trunk", 1.5, False),
        ("collapse-1", 2.0, False),
        ("trunk", 4.0, False),
    ]


def test_seeds_of_branches_are_their_own_and_stay_what_they_are() -> None:
    assert phases_of(config_of("train.seed=7"))[0].seed == 7
    seeds = {branch_seed(seed, member) for seed in range(50) for member in range(1, 6)}
    assert len(seeds) == 50 * 5
    assert all(50 <= seed < 2**63 for seed in seeds)
    # A run that is resumed years later must find the same images.
    assert branch_seed(0, 1) == 28940085870209527


def test_the_trunk_makes_the_same_steps_with_and_without_cuts() -> None:
    cut, whole = (
        config_of("train.reset_momentum_at_epochs=[0.25, 1.0]"),
        small_config("train.global_batch_size=0:40 0.6:48 3:80"),
    )
    first, *_ = phases_of(cut)
    clock, found = start_clock(cut, first, 330), []
    for phase in phases_of(cut):
        if phase.is_branch:
            continue
        control = control_of(cut, phase, clock)
        for step in control:
            assert not control.is_over(clock.samples)
            found.append((step.start_samples, step.num_samples, step.index))
            clock = clock.after(step.num_samples)
        assert control.is_over(clock.samples)
        assert clock.epoch >= min(phase.until_epoch, 4.0 - 8 / 330)
    [phase] = phases_of(whole)
    steps = control_of(whole, phase, start_clock(whole, phase, 330))
    assert found == [(step.start_samples, step.num_samples, step.index) for step in steps]


def test_a_branch_has_its_own_clock_seed_and_batch() -> None:
    config = config_of()
    branch = resolved(phases_of(config)[1], config, TRUNK)
    clock = start_clock(config, branch, 330, TRUNK.steps)
    assert (clock.samples, clock.total_samples, clock.steps) == (0, 660, 8)
    assert branch.seed == branch_seed(0, 1) != 0
    steps = list(control_of(config, branch, clock))
    assert [step.num_samples for step in steps] == [48] * 13 + [32]  # the stage of the trunk where it begins
    assert (steps[0].index, steps[0].epoch, steps[0].growth) == (8, 0.0, 1.0)
    assert planned_samples(config, 330) == 1320 + 2 * 660
    given = config_of("collapse.global_batch_size=16")
    assert next(iter(control_of(given, resolved(branch, given, TRUNK), clock))).num_samples == 16
    assert resolved(branch, config, TRUNK, measured_batch_size=64).global_batch_size == 64


def test_values_of_a_branch_start_where_the_trunk_is() -> None:
    overrides = ("optimizer.lr=[{until_epoch=4, shape='linear', start=0.4, end=0.0}]",)
    config = config_of(*overrides)
    optimizer = resolved(phases_of(config)[1], config, TRUNK).optimizer
    begin = 0.4 * (1 - 345 / 330 / 4)
    assert value_at(optimizer.lr, 0.0) == pytest.approx(begin)
    assert value_at(optimizer.lr, 1.0) == pytest.approx(begin / 4)  # power 2, half way
    assert value_at(optimizer.lr, 2.0) == 0.0
    assert value_at(optimizer.weight_decay, 1.0) == 5e-4
    assert value_at(optimizer.momentum, 1.0) == 0.9
    # 48 instead of the first stage's 40: a rule that keeps the noise has raised the trunk's lr by then.
    raised = config_of(*overrides, "batch_control.noise_rule=lr")
    optimizer = resolved(phases_of(raised)[1], raised, TRUNK).optimizer
    assert value_at(optimizer.lr, 0.0) == pytest.approx(1.2 * begin)
    own = config_of(*overrides, "collapse.lr=0.05", "collapse.momentum=0.5", "collapse.weight_decay=2e-4")
    optimizer = resolved(phases_of(own)[1], own, TRUNK).optimizer
    assert (optimizer.lr, optimizer.momentum, optimizer.weight_decay) == (0.05, 0.5, 2e-4)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), AugmentConfig(crop="pad", padding=2, flip=True)),
        (("collapse.augment=off",), AugmentConfig()),
        (
            ("collapse.augment=same", "data.augment.area_min=0.5"),
            AugmentConfig(crop="pad", padding=2, flip=True, area_min=0.5),
        ),
    ],
)
def test_augmentation_of_a_branch(overrides: tuple[str, ...], expected: AugmentConfig) -> None:
    assert phases_of(config_of(*overrides))[1].augment == expected


def test_a_plain_branch_of_resized_crops_changes_neither_scale_nor_shape() -> None:
    found = phases_of(config_of("data.augment.crop=resized"))[1].augment
    assert found == AugmentConfig(crop="resized", flip=True, side_share=7 / 8)


def test_a_collapse_shorter_than_a_ghost_batch_is_refused() -> None:
    config = small_config("collapse.at_epochs=[1]", "collapse.epochs=0.01")
    with pytest.raises(ConfigError, match=r"collapse.epochs 0.01 of 330 images is 3, a ghost batch needs 8"):
        planned_samples(config, 330)


def test_the_bar_ends_where_max_steps_do() -> None:
    plain = ["train.epochs=4", "train.global_batch_size=0:40 1:80"]  # 9 steps of 40 pass epoch 1 of 330 images
    assert planned_samples(small_config(*plain), 330) == 1320
    assert planned_samples(small_config(*plain, "train.max_steps=12"), 330) == 9 * 40 + 3 * 80
    assert planned_samples(small_config(*plain, "train.max_steps=1000"), 330) == 1320


@pytest.mark.parametrize(
    ("setting", "due_after"),
    [
        ("train.evaluate_every_epochs=0.5", [2, 3, 5]),  # 50, 100 and 150 images are reached
        ("checkpoint.every_epochs=1", [3]),
        ("checkpoint.every_steps=2", [2, 4]),
        ("train.digest_every_steps=3", [3]),
        ("train.epochs=4", []),
    ],
)
def test_steps_of_40_images_in_epochs_of_100(setting: str, due_after: list[int]) -> None:
    config = small_config("train.digest_every_steps=0", setting)
    found, clock = [], Clock(samples_per_epoch=100, total_samples=400)
    for size in (40, 40, 40, 20, 30):
        before, clock = clock, clock.after(size)
        looks = (
            evaluation_is_due(config, before, clock),
            checkpoint_is_due(config, before, clock),
            digest_is_due(config, clock),
        )
        step = Step(before.steps, before.samples, size, 10, before.epoch)
        assert weights_are_needed(config, before, step) == any(looks)
        assert weights_are_needed(config, before, replace(step, is_last=True))
        found += [clock.steps] * any(looks)
    assert found == due_after
