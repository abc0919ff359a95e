"""One-call schedules against the tables of the papers, joints and jumps included."""

from __future__ import annotations

from typing import Any

import pytest

from megabatch.errors import ConfigError
from megabatch.schedule.pieces import Piece, value_at
from megabatch.schedule.schedules import constant, cosine, cycle, linear_warmup, polynomial, slow_start, steps

# Iterations an epoch of the two runs that Codreanu's files describe.
MAIN_ITERATIONS, CYCLIC_ITERATIONS = 8040 / 90, 7800 / 25


def test_slow_start_of_akiba() -> None:
    """eta_base = 0.1 * 1024 * 32 / 256 = 12.8; first, middle and last moment of every phase."""
    rates = slow_start(0.1 * 1024 * 32 / 256)
    for first, last, rate in ((0, 39.999, 6.4), (40, 69.999, 0.96), (70, 84.999, 0.128), (85, 89.999, 0.0128)):
        for epoch in (first, (first + last) / 2, last):
            assert value_at(rates, epoch) == pytest.approx(rate, rel=1e-12)
    assert value_at(rates, 90) == pytest.approx(0.0128)


def test_large_batch_run_of_codreanu() -> None:
    """0.1 -> 4.8 in 446 iterations, then 4.8 * (1 - it / 8040): it counts the warm-up too, hence the jump."""
    rates = [*linear_warmup(4.8, epochs=5, start=0.1), *polynomial(4.8, until_epoch=90, power=1, from_epoch=0)]
    assert value_at(rates, 0) == pytest.approx(0.1)
    assert value_at(rates, 2.5) == pytest.approx((0.1 + 4.8) / 2)
    assert value_at(rates, 5 - 1e-9) == pytest.approx(4.8)
    assert value_at(rates, 5) == pytest.approx(4.8 * (1 - 5 / 90))  # 4.53: it falls by 6 % at once
    for iteration in (1000, 4020, 7638, 8039):
        assert value_at(rates, iteration / MAIN_ITERATIONS) == pytest.approx(4.8 * (1 - iteration / 8040), rel=1e-9)
    assert value_at(rates, 7638 / MAIN_ITERATIONS) == pytest.approx(0.24)
    collapse = polynomial(0.254, until_epoch=402 / MAIN_ITERATIONS)
    assert value_at(collapse, 0) == 0.254
    assert value_at(collapse, 201 / MAIN_ITERATIONS) == pytest.approx(0.254 / 4)
    assert value_at(collapse, 402 / MAIN_ITERATIONS) == 0.0


def test_cyclic_run_of_codreanu() -> None:
    """The five phases of the 72-epoch run: value at begin, after the re-warm-up and at the end of each."""

    def epochs(iterations: float) -> float:
        return iterations / CYCLIC_ITERATIONS

    # iterations, base, power, curve, re-warm-up iterations, its start, value at the end
    phases = (
        (7800, 1.6, 1.0, 18720, 1560, 0.1, 0.933),
        (3750, 1.02, 2.0, 7500, 0, 0.0, 0.255),
        (4750, 0.764, 2.0, 7500, 1000, 0.255, 0.103),
        (4750, 0.572, 2.0, 7500, 1000, 0.19, 0.077),
        (1560, 0.143, 2.0, 1560, 0, 0.0, 0.0),
    )
    rates: list[Piece] = []
    begin = 0.0
    for length, base, power, curve, warmup, start, _ in phases:
        rates += cycle(
            begin,
            epochs(length),
            base,
            epochs(curve),
            power=power,
            warmup_epochs=epochs(warmup),
            warmup_start=start,
        )
        begin += epochs(length)
    at = 0.0
    for length, base, power, curve, warmup, start, end in phases:
        assert value_at(rates, at + 1e-9) == pytest.approx(start if warmup else base, abs=1e-6)
        if warmup:
            assert value_at(rates, at + epochs(warmup) - 1e-9) == pytest.approx(base, abs=1e-6)
            after = base * (1 - warmup / curve) ** power
            assert value_at(rates, at + epochs(warmup) + 1e-9) == pytest.approx(after, abs=1e-6)
        at += epochs(length)
        assert value_at(rates, at - 1e-9) == pytest.approx(end, abs=6e-4)
        assert value_at(rates, at - 1e-9) == pytest.approx(base * (1 - length / curve) ** power, abs=1e-6)


def test_steps_of_goyal() -> None:
    rates = [*linear_warmup(3.2, epochs=5, start=0.1), *steps(3.2, {30: 0.1, 60: 0.01, 80: 0.001}, until_epoch=90)]
    expected = {0: 0.1, 2.5: 1.65, 5: 3.2, 29.9: 3.2, 30: 0.32, 60: 0.032, 80: 0.0032, 90: 0.0032}
    for epoch, rate in expected.items():
        assert value_at(rates, epoch) == pytest.approx(rate)


def test_momentum_is_scheduled_alike_and_other_shapes_join() -> None:
    momentum = [*constant(0.9, until_epoch=4), *cosine(0.9, until_epoch=8, end=0.5), *constant(0.5, until_epoch=9)]
    assert [value_at(momentum, epoch) for epoch in (0, 4, 6, 8, 20)] == pytest.approx([0.9, 0.9, 0.7, 0.5, 0.5])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: linear_warmup(-1.0, epochs=5), r"end -1.0 cannot be used: input should be greater than or equal to 0"),
        (lambda: linear_warmup(1.0, epochs=0), "greater than 0"),
        (lambda: slow_start(-12.8), "greater than or equal to 0"),
        (lambda: polynomial(1.0, until_epoch=5, end_epoch=3), "reaches its end before until_epoch 5"),
        (lambda: polynomial(1.0, until_epoch=5, power=0), "power 0"),
        (lambda: cycle(0, 10, 1.0, zero_after_epochs=9), "curve of 9"),
        (lambda: cycle(0, 10, 1.0, zero_after_epochs=20, warmup_epochs=10), "re-warm-up of 10"),
        (lambda: value_at([*slow_start(1.0), *linear_warmup(1.0, epochs=5)], 3), "rising until_epoch"),
    ],
)
def test_what_cannot_work_is_one_line(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)
