"""Batch-size control in a stranger's loop: the same steps on every rank, counted in images."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.errors import ConfigError
from megabatch.schedule.adaptive import AdaptiveBatch
from megabatch.schedule.batch import Step, count_steps
from megabatch.schedule.control import BatchControl
from megabatch.schedule.noise import NoiseRule, NoiseSample, keep_noise


def control(
    rank: int = 0, world_size: int = 1, batch: int | str = "0:16 0.7:40 1.5:24", noise_rule: NoiseRule = "falls"
) -> BatchControl:
    options = {"ghost_batch_size": 8, "samples_per_epoch": 100, "rank": rank, "world_size": world_size}
    return BatchControl(batch, epochs=2.5, noise_rule=noise_rule, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_every_image_of_every_step_once(world_size: int) -> None:
    of_ranks = [list(control(rank, world_size)) for rank in range(world_size)]
    assert len({len(steps) for steps in of_ranks}) == 1
    seen = 0
    for steps in zip(*of_ranks, strict=True):
        assert len({replace(step, rank=0) for step in steps}) == 1
        positions = list(itertools.chain(*(ghost for step in steps if not step.is_idle for ghost in step.ghosts)))
        assert positions == list(range(seen, seen + steps[0].num_samples))
        assert sum(len(step.ghosts) for step in steps if not step.is_idle) == steps[0].num_ghosts
        for idle in (step for step in steps if step.is_idle):  # it goes along with a batch of the step, without weight
            assert (len(idle.ghosts), idle.loss_weight) == (1, 0.0)
            assert set(idle.ghosts[0]) <= set(positions)
        seen += steps[0].num_samples
    assert seen == 248  # 250 images, cut to whole ghost batches
    assert [step.is_last for step in of_ranks[0]] == [False] * (len(of_ranks[0]) - 1) + [True]


def test_the_batch_changes_in_the_middle_of_an_epoch() -> None:
    steps = list(control())
    # 16 up to 0.7 epochs = 70 images: the step that starts at 64 is still one of 16, the one at 80 has 40.
    assert [step.num_samples for step in steps] == [16] * 5 + [40, 40] + [24] * 3 + [16]
    assert [step.growth for step in steps] == [1.0] * 5 + [2.5, 2.5] + [1.5] * 4  # the cut last one is of its stage
    assert steps[5].epoch == pytest.approx(0.8)


def test_rates_follow_the_chosen_rule() -> None:
    def rates(step: Step) -> tuple[float, float]:
        return step.keep_noise(0.1, 0.9)

    rules: tuple[NoiseRule, ...] = ("falls", "lr", "momentum")
    falls, rate, momentum = (list(control(noise_rule=rule))[5] for rule in rules)
    assert rates(falls) == (0.1, 0.9)
    assert rates(rate) == pytest.approx((0.25, 0.9))
    assert rates(momentum) == pytest.approx((0.1, 1 - 0.1 / 2.5))
    assert keep_noise("lr", 0.1, 0.9, 1.0) == (0.1, 0.9)


@given(stop=st.integers(0, 10), world_size=st.integers(1, 5))
@settings(max_examples=40)
def test_a_resumed_loop_goes_on_inside_any_stage(stop: int, world_size: int) -> None:
    whole = list(control())
    first = control()
    done = list(itertools.islice(first, stop))
    second = control(world_size - 1, world_size)  # on other ranks than before
    second.load_state_dict(first.state_dict())
    assert second.epoch == first.epoch
    assert done + [replace(step, rank=0, world_size=1) for step in second] == whole


def test_the_state_counts_the_step_being_made() -> None:
    loop = control()
    next(iter(loop))
    assert loop.state_dict() == {"samples": 16, "steps": 1, "samples_per_epoch": 100}


def test_it_agrees_with_the_count_of_steps() -> None:
    made = control()
    assert len(list(control())) == count_steps(made.stages, 8, 100, 250)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("0:16 0.5:20", "global_batch_size 20 is not a multiple of ghost_batch_size 8; nearest that fit: 16, 24"),
        ("0:16 0.5:24 0.5:32", "rise"),
        ("0:16 0.9:24 0.5:32", "rise"),
        ("0.5:16", "begin at epoch 0"),
    ],
)
def test_bad_stages_are_one_line(batch: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        control(batch=batch)
    assert "\n" not in str(caught.value)


def test_too_few_images_and_another_set_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than a ghost batch"):
        BatchControl(64, ghost_batch_size=64, samples_per_epoch=100, epochs=0.5)
    with pytest.raises(ConfigError, match="ranks are 0 to 2"):
        control(3, 3)
    with pytest.raises(ConfigError, match="give the data of that run"):
        control().load_state_dict({"samples": 16, "steps": 1, "samples_per_epoch": 99})


def test_a_cut_and_a_limit_end_the_steps_and_say_so() -> None:
    whole = list(control())
    options: dict[str, Any] = {"ghost_batch_size": 8, "samples_per_epoch": 100, "epochs": 2.5}
    cut = BatchControl("0:16 0.7:40 1.5:24", until_epoch=1.2, **options)
    steps = list(cut)
    assert [replace(step, is_last=False) for step in steps] == whole[:6]  # the one at 1.2 belongs to the next part
    assert steps[-1].is_last
    assert cut.is_over(steps[-1].end_samples)
    assert list(cut) == []
    limited = BatchControl("0:16 0.7:40 1.5:24", max_steps=3, **options)
    assert [step.is_last for step in limited] == [False, False, True]
    assert not limited.is_over(limited.samples)
    assert list(limited) == []


def test_a_measured_batch_decides_the_steps_and_close_ends_them() -> None:
    adaptive = AdaptiveBatch(16, max_global_batch_size=32, ghost_batch_size=8, patience=1, lead_steps=1)
    made = BatchControl(adaptive, ghost_batch_size=8, samples_per_epoch=100, epochs=2.5, noise_rule="lr")
    steps = []
    for step in made:
        steps.append(step)
        adaptive.observe(made.epoch, NoiseSample(noise=1000.0, signal=1.0))
        if len(steps) == 4:
            break
    assert [step.num_samples for step in steps] == [16, 16, 32, 32]
    assert steps[-1].keep_noise(0.1, 0.9) == (0.2, 0.9)
    again = AdaptiveBatch(16, max_global_batch_size=32, ghost_batch_size=8, patience=1, lead_steps=1)
    resumed = BatchControl(again, ghost_batch_size=8, samples_per_epoch=100, epochs=2.5)
    resumed.load_state_dict(made.state_dict())
    assert next(iter(resumed)).num_samples == 32
    resumed.close()
    assert list(resumed) == []
