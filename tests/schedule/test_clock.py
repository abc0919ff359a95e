"""The clock counts samples and updates, and says when a multiple of some epochs has been passed."""

from __future__ import annotations

import dataclasses

import pytest

from megabatch.schedule.clock import Clock


def test_a_clock_moves_by_updates_and_is_never_changed() -> None:
    start = Clock(samples_per_epoch=50, total_samples=125)
    later = start.after(20).after(30)
    assert (start.samples, start.updates, start.epoch, start.total_epochs) == (0, 0, 0.0, 2.5)
    assert (later.samples, later.updates, later.epoch, later.total_epochs) == (50, 2, 1.0, 2.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        start.samples = 3  # type: ignore[misc]


def crossings(every_epochs: float, samples_per_epoch: int, batch_total: int, num_updates: int) -> list[int]:
    clock = Clock(samples_per_epoch, batch_total * num_updates)
    found = []
    for _ in range(num_updates):
        before, clock = clock, clock.after(batch_total)
        if clock.crosses(before, every_epochs):
            found.append(clock.updates)
    return found


@pytest.mark.parametrize(
    ("every_epochs", "samples_per_epoch", "batch_total", "expected"),
    [
        (1.0, 10, 4, [3, 5, 8, 10]),  # 12 >= 10, 20 >= 20, 32 >= 30, 40 >= 40
        (0.5, 10, 4, [2, 3, 4, 5, 7, 8, 9, 10]),
        (2.0, 10, 4, [5, 10]),
        (1.0, 10, 30, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),  # several epochs at once count as one crossing
        (100.0, 10, 4, []),
        (0.0, 10, 4, []),
    ],
)
def test_crossings_by_hand(every_epochs: float, samples_per_epoch: int, batch_total: int, expected: list[int]) -> None:
    assert crossings(every_epochs, samples_per_epoch, batch_total, 10) == expected


@pytest.mark.parametrize("every_epochs", [0.1, 0.3, 0.7, 1.1])
def test_no_crossing_is_lost_or_doubled_by_rounding(every_epochs: float) -> None:
    """100 pictures an epoch, one at a time: multiples of a tenth fall on whole pictures, such as 3 * 0.1 on 30."""
    step = round(every_epochs * 100)
    assert crossings(every_epochs, 100, 1, 1000) == list(range(step, 1001, step))


def test_the_last_update_of_an_epoch_is_its_crossing() -> None:
    assert crossings(1.0, 50_000, 1000, 100) == [50, 100]
