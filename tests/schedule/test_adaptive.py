"""The batch grows when the noise scale says so: bounds, patience, lead, resume, and that nobody runs ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megabatch.schedule.adaptive import AdaptiveBatch
from megabatch.schedule.noise import NoiseSample


def made(**changes: float) -> AdaptiveBatch:
    options: dict[str, float] = {"patience": 3, "lead_steps": 4, "from_epoch": 1.0, **changes}
    return AdaptiveBatch(64, 300, 8, **options)  # type: ignore[arg-type]


def average(scale: float) -> NoiseSample:
    return NoiseSample(0.5 * scale, 0.5)


def batches(control: AdaptiveBatch, scales: Sequence[float], epoch: float = 2.0) -> list[int]:
    """The batch of every step of a run in which these noise scales are measured one after the other."""
    found = []
    for number, scale in enumerate(scales):
        found.append(control.wait_for(number))
        control.observe(epoch, average(scale))
    return found


def test_it_grows_after_patience_and_lead_up_to_the_bound_and_never_shrinks() -> None:
    found = batches(made(), [1000.0] * 40 + [1.0] * 10)
    # Three measurements in favour (steps 0-2), then four steps that are already settled: 7 of 64.
    assert found[:8] == [64] * 7 + [128]
    changes = [number for number, (a, b) in enumerate(pairwise(found), start=1) if a != b]
    assert [found[number] for number in changes] == [128, 256, 296]  # 300 is no multiple of 8
    # Measurements made before a change has taken effect do not count for the next one.
    assert changes == [7, 14, 21]
    assert found[-1] == 296


@pytest.mark.parametrize(
    ("scales", "epoch", "why"),
    [
        ([127.0] * 20, 2.0, "below the grown batch of 128"),
        ([1000.0] * 20, 0.9, "warm-up"),
        ([1000.0, 1000.0, 5.0] * 7, 2.0, "never three in a row"),
        ([0.0] * 20, 2.0, "nothing measured yet"),
    ],
)
def test_it_stays(scales: list[float], epoch: float, why: str) -> None:
    assert set(batches(made(), scales, epoch)) == {64}, why


def test_noise_without_a_signal_above_it_lets_the_batch_grow() -> None:
    control = made()
    for _ in range(3):
        control.observe(2.0, NoiseSample(5.0, -0.01))
    assert control.changes == [(7, 128)]
    for _ in range(20):
        control.observe(2.0, NoiseSample(-5.0, -0.01))  # an estimate of the noise itself below zero says nothing
    assert control.changes == [(7, 128)]


def test_threshold_scales_the_demand() -> None:
    assert batches(made(threshold=0.5), [64.0] * 10)[-1] == 128
    assert set(batches(made(threshold=2.0), [255.0] * 20)) == {64}


def test_steps_without_a_measurement_neither_help_nor_harm() -> None:
    control = made()
    for number in range(9):
        control.observe(2.0, average(1000.0) if number % 3 == 0 else None)
    assert control.changes == [(7 + 4, 128)]


@given(st.lists(st.floats(1, 2000), min_size=1, max_size=60), st.integers(0, 60))
@example([1000.0] * 30, 2).via("patience half used up")
@example([1000.0] * 30, 5).via("decided, not yet in effect")
@settings(max_examples=60)
def test_resumed_anywhere_it_makes_the_same_steps(scales: list[float], stop: int) -> None:
    whole = batches(made(), scales)
    first, second = made(), made()
    batches(first, scales[:stop])
    second.load_state_dict(first.state_dict())
    rest = []
    for number in range(min(stop, len(scales)), len(scales)):
        rest.append(second.wait_for(number))
        second.observe(2.0, average(scales[number]))
    assert rest == whole[min(stop, len(scales)) :]
    assert all(total % 8 == 0 and 64 <= total <= 300 for total in whole)


def test_who_prepares_ahead_waits_for_what_is_not_settled() -> None:
    control = made()
    got: list[int] = []
    ahead = threading.Thread(target=lambda: got.extend(control.wait_for(n) for n in range(10)))
    ahead.start()
    ahead.join(timeout=0.3)
    assert len(got) == 5  # steps 0 to 4 need no measurement
    for _ in range(5):
        control.observe(2.0, average(1000.0))
    ahead.join(timeout=10)
    assert got == [64] * 7 + [128] * 3


def test_close_lets_a_waiter_go() -> None:
    control = made()
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(control.wait_for(99)))
    waiter.start()
    control.close()
    waiter.join(timeout=10)
    assert got == [0]
    control.reopen()
    assert control.wait_for(0) == 64
