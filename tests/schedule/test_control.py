"""Batch-size control in a stranger's loop: the same steps on every rank, counted in images."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.errors import ConfigError
from megabatch.schedule.batch import count_steps
from megabatch.schedule.control import BatchControl, BatchStep, NoiseRule, keep_noise


def control(
    rank: int = 0, world_size: int = 1, batch: int | str = "0:16 0.7:40 1.5:24", noise: NoiseRule = "falls"
) -> BatchControl:
    options = {"ghost_batch_size": 8, "samples_per_epoch": 100, "rank": rank, "world_size": world_size}
    return BatchControl(batch, epochs=2.5, noise=noise, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_every_image_of_every_step_once(world_size: int) -> None:
    of_ranks = [list(control(rank, world_size)) for rank in range(world_size)]
    assert len({len(steps) for steps in of_ranks}) == 1
    seen = 0
    for steps in zip(*of_ranks, strict=True):
        assert len({step.step for step in steps}) == 1
        positions = list(itertools.chain(*(ghost for step in steps for ghost in step.ghosts)))
        assert positions == list(range(seen, seen + steps[0].global_batch_size))
        assert sum(step.batch_on_rank for step in steps) == steps[0].global_batch_size
        assert all(step.accumulation_steps == len(step.ghosts) for step in steps)
        seen += steps[0].global_batch_size
    assert seen == 248  # 250 images, cut to whole ghost batches
    assert [step.is_last for step in of_ranks[0]] == [False] * (len(of_ranks[0]) - 1) + [True]


def test_the_batch_changes_in_the_middle_of_an_epoch() -> None:
    steps = list(control())
    # 16 up to 0.7 epochs = 70 images: the step that starts at 64 is still one of 16, the one at 80 has 40.
    assert [step.global_batch_size for step in steps] == [16] * 5 + [40, 40] + [24] * 3 + [16]
    assert [step.growth for step in steps] == [1.0] * 5 + [2.5, 2.5] + [1.5] * 4  # the cut last one is of its stage
    assert steps[5].epoch == pytest.approx(0.8)


def test_rates_follow_the_chosen_rule() -> None:
    def rates(step: BatchStep) -> tuple[float, float]:
        return step.keep_noise(0.1, 0.9)

    rules: tuple[NoiseRule, ...] = ("falls", "lr", "momentum")
    falls, rate, momentum = (list(control(noise=rule))[5] for rule in rules)
    assert rates(falls) == (0.1, 0.9)
    assert rates(rate) == pytest.approx((0.25, 0.9))
    assert rates(momentum) == pytest.approx((0.1, 1 - 0.1 / 2.5))
    assert keep_noise("lr", 0.1, 0.9, 1.0) == (0.1, 0.9)


@given(stop=st.integers(0, 10), world_size=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_resumed_loop_goes_on_inside_any_stage(stop: int, world_size: int) -> None:
    whole = [step.step for step in control()]
    first = control()
    done = [step.step for step in itertools.islice(first, stop)]
    second = control(world_size - 1, world_size)  # on other ranks than before
    second.load_state_dict(first.state_dict())
    assert second.epoch == first.epoch
    assert done + [step.step for step in second] == whole


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
        ("0:16 0.5:20", "20 is not a multiple of train.ghost_batch_size 8; nearest that fit: 16, 24"),
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
