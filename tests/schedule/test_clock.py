"""The clock counts samples and steps, and says when a multiple of some epochs has been passed."""

from __future__ import annotations

import dataclasses

import pytest

from megabatch.schedule.clock import Clock


def test_a_clock_moves_by_steps_and_is_never_changed() -> None:
    start = Clock(samples_per_epoch=50, total_samples=125)
    later = start.after(20).after(30)
    assert (start.samples, start.steps, start.epoch, start.total_epochs) == (0, 0, 0.0, 2.5)
    assert (later.samples, later.steps, later.epoch, later.total_epochs) == (50, 2, 1.0, 2.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        start.samples = 3  # type: ignore[misc]


def crossings(every_epochs: float, samples_per_epoch: int, global_batch_size: int, num_steps: int) -> list[int]:
    clock = Clock(samples_per_epoch, global_batch_size * num_steps)
    found = []
    for _ in range(num_steps):
        before, clock = clock, clock.after(global_batch_size)
        if clock.crosses(before, every_epochs):
            found.append(clock.steps)
    return found


@pytest.mark.parametrize(
    ("every_epochs", "samples_per_epoch", "global_batch_size", "expected"),
    [
        (1.0, 10, 4, [3, 5, 8, 10]),  # 12 >= 10, 20 >= 20, 32 >= 30, 40 >= 40
        (0.5, 10, 4, [2, 3, 4, 5, 7, 8, 9, 10]),
        (2.0, 10, 4, [5, 10]),
        (1.0, 10, 30, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),  # several epochs at once count as one crossing
        (100.0, 10, 4, []),
        (0.0, 10, 4, []),
    ],
)
def test_crossings_by_hand(
    every_epochs: float, samples_per_epoch: int, global_batch_size: int, expected: list[int]
) -> None:
    assert crossings(every_epochs, samples_per_epoch, global_batch_size, 10) == expected


@pytest.mark.parametrize("every_epochs", [0.1, 0.3, 0.7, 1.1])
def test_no_crossing_is_lost_or_doubled_by_rounding(every_epochs: float) -> None:
    """100 images an epoch, one at a time: multiples of a tenth fall on whole images, such as 3 * 0.1 on 30."""
    step = round(every_epochs * 100)
    assert crossings(every_epochs, 100, 1, 1000) == list(range(step, 1001, step))


def test_the_last_step_of_an_epoch_is_its_crossing() -> None:
    assert crossings(1.0, 50_000, 1000, 100) == [50, 100]
