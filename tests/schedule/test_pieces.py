"""Schedules against values worked out by hand from the papers, and their joints, ends and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megabatch.errors import ConfigError
from megabatch.schedule.pieces import Piece, check_pieces, largest_value, scaled, smallest_value, value_at

# Akiba 2017, section 4: slow start, factors of 12.8 for a batch of 1024 x 32.
AKIBA = (
    Piece(until_epoch=40, start=6.4),
    Piece(until_epoch=70, start=0.96),
    Piece(until_epoch=85, start=0.128),
    Piece(until_epoch=90, start=0.0128),
)

# Codreanu 2017, the 448-node run: linear warm-up to 4.8 in 5 epochs, then 4.8 * (1 - epoch / 90). The polynomial counts
# from epoch 0, so the rate drops from 4.8 to 4.8 * 85 / 90 where the warm-up ends.
CODREANU_MAIN = (
    Piece(until_epoch=5, shape="linear", start=0.1, end=4.8),
    Piece(until_epoch=90, shape="polynomial", start=4.8 * 85 / 90, end=0.0, power=1),
)

# The collapse of that run: 0.254 * (1 - x) ** 2 over 4.5 epochs.
CODREANU_COLLAPSE = (Piece(until_epoch=4.5, shape="polynomial", start=0.254, end=0.0, power=2),)

# The first phase of the cyclic run: 5 epochs up to 1.6, then 1.6 * (1 - iteration / 18720) cut at iteration 7800 of 312
# an epoch. A straight line that is cut is a straight line between other ends.
CODREANU_CYCLE = (
    Piece(until_epoch=5, shape="linear", start=0.1, end=1.6),
    Piece(until_epoch=25, shape="linear", start=1.6 * (1 - 1560 / 18720), end=1.6 * (1 - 7800 / 18720)),
)


@pytest.mark.parametrize(
    ("schedule", "epoch", "value"),
    [
        (AKIBA, 0, 6.4),
        (AKIBA, 39.999, 6.4),
        (AKIBA, 40, 0.96),
        (AKIBA, 69.999, 0.96),
        (AKIBA, 70, 0.128),
        (AKIBA, 84.999, 0.128),
        (AKIBA, 85, 0.0128),
        (AKIBA, 89.999, 0.0128),
        (AKIBA, 90, 0.0128),
        (CODREANU_MAIN, 0, 0.1),
        (CODREANU_MAIN, 2.5, 2.45),
        (CODREANU_MAIN, 5, 4.533333333333333),
        (CODREANU_MAIN, 45, 2.4),
        (CODREANU_MAIN, 85, 0.26666666666666666),
        (CODREANU_MAIN, 90, 0.0),
        (CODREANU_MAIN, 200, 0.0),
        (CODREANU_COLLAPSE, 0, 0.254),
        (CODREANU_COLLAPSE, 2.25, 0.0635),
        (CODREANU_COLLAPSE, 4.5, 0.0),
        (CODREANU_CYCLE, 5, 1.4666666666666666),
        (CODREANU_CYCLE, 15, 1.2),
        (CODREANU_CYCLE, 25, 0.9333333333333333),
        (0.25, 0, 0.25),
        (0.25, 1e9, 0.25),
        (3, 1, 3.0),
    ],
)
def test_values_of_the_papers(schedule: Any, epoch: float, value: float) -> None:
    assert value_at(schedule, epoch) == pytest.approx(value, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("share", "value"), [(0, 2.0), (1 / 3, 1.625), (0.5, 1.25), (2 / 3, 0.875), (1, 0.5)])
def test_cosine(share: float, value: float) -> None:
    """cos of 0, 60, 90, 120 and 180 degrees is 1, 1/2, 0, -1/2 and -1."""
    assert Piece(until_epoch=1, shape="cosine", start=2.0, end=0.5).at(share) == pytest.approx(value, abs=1e-15)


def test_a_polynomial_with_an_end_above_zero() -> None:
    piece = Piece(until_epoch=1, shape="polynomial", start=2.0, end=0.5, power=3)
    assert piece.at(0.5) == 0.5 + 1.5 / 8
    assert (piece.at(0), piece.at(1)) == (2.0, 0.5)


shapes = st.sampled_from(["linear", "cosine", "polynomial"])
values = st.floats(0, 100, allow_subnormal=False)


@given(shapes, values, values, st.floats(0.1, 5), st.floats(0, 1))
def test_every_shape_stays_between_its_ends_and_reaches_them(
    shape: Any, start: float, end: float, power: float, share: float
) -> None:
    piece = Piece(until_epoch=1, shape=shape, start=start, end=end, power=power)
    slack = 1e-9 * max(start, end)
    assert min(start, end) - slack <= piece.at(share) <= max(start, end) + slack
    assert piece.at(0.0) == pytest.approx(start, abs=slack)
    assert piece.at(1.0) == pytest.approx(end, abs=slack)


@given(st.floats(0.5, 80, allow_subnormal=False), st.floats(0.01, 50))
def test_a_joint_of_equal_values_has_no_jump(joint: float, length: float) -> None:
    schedule = (
        Piece(until_epoch=joint, shape="linear", start=0.0, end=3.0),
        Piece(until_epoch=joint + length, shape="cosine", start=3.0, end=0.0),
    )
    for epoch in (joint * (1 - 1e-9), joint, joint * (1 + 1e-9)):
        assert value_at(schedule, epoch) == pytest.approx(3.0, abs=1e-5)
    assert value_at(schedule, joint) == 3.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"start": 1, "end": 2}, "takes no `end`"),
        ({"start": 1, "shape": "linear"}, "needs an `end`"),
        ({"start": 1, "shape": "cosine"}, "needs an `end`"),
        ({"start": -1}, "greater than or equal to 0"),
        ({"start": float("inf")}, "finite"),
        ({"start": 1, "shape": "linear", "end": float("nan")}, "finite"),
        ({"start": 1, "until_epoch": 0}, "greater than 0"),
        ({"start": 1, "until_epoch": float("inf")}, "finite"),
        ({"start": 1, "shape": "polynomial", "end": 0, "power": 0}, "greater than 0"),
        ({"start": 1, "shape": "zigzag"}, "zigzag"),
        ({"start": 1, "stop": 2}, "Extra inputs"),
        ({}, "start"),
    ],
)
def test_a_piece_that_makes_no_sense_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Piece.model_validate({"until_epoch": 1, **fields})


def test_a_constant_may_repeat_its_value_as_end() -> None:
    assert value_at((Piece(until_epoch=1, start=2, end=2),), 0.5) == 2


# Counted from the run's start and cut before the end, as the solver of Codreanu 2017 has it.
COUNTED_FROM_THE_START = (
    Piece(until_epoch=5, shape="linear", start=0.1, end=1.6),
    Piece(until_epoch=25, shape="polynomial", start=1.6, end=0.0, from_epoch=0, end_epoch=60),
)


@pytest.mark.parametrize("epoch", [0, 3, 5, 15, 24.9, 25, 80])
def test_a_way_that_begins_earlier_and_ends_later_than_its_piece(epoch: float) -> None:
    """The same values as the straight line between other ends, worked out by hand above."""
    assert value_at(COUNTED_FROM_THE_START, epoch) == pytest.approx(value_at(CODREANU_CYCLE, epoch), rel=1e-12)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([], r"rising until_epoch values, given \[\]"),
        ([Piece(until_epoch=3, start=1), Piece(until_epoch=2, start=1)], r"given \[3.0, 2.0\]"),
        ([Piece(until_epoch=3, start=1), Piece(until_epoch=3, start=1)], "rising"),
        (
            [Piece(until_epoch=3, start=1), Piece(until_epoch=5, start=1, from_epoch=4)],
            "from_epoch 4 but begins at epoch 3",
        ),
    ],
)
def test_pieces_out_of_order_are_refused_wherever_they_come_from(pieces: list[Piece], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        value_at(pieces, 1.0)
    with pytest.raises(ConfigError, match=r"of momentum"):
        check_pieces(pieces, "momentum")


def test_a_way_that_ends_within_its_piece_is_refused() -> None:
    with pytest.raises(ValidationError, match="end_epoch 4 reaches its end before until_epoch 5"):
        Piece(until_epoch=5, shape="polynomial", start=1, end=0, end_epoch=4)


@given(st.floats(0, 30), st.floats(0.1, 10))
def test_scaled_keeps_the_shape(epoch: float, factor: float) -> None:
    level = scaled(COUNTED_FROM_THE_START, factor)
    assert value_at(level, epoch) == pytest.approx(factor * value_at(COUNTED_FROM_THE_START, epoch), rel=1e-9)


def test_a_plain_number_is_scaled() -> None:
    assert scaled(0.5, 3.0) == 1.5
    assert (largest_value(0.5), largest_value(CODREANU_MAIN)) == (0.5, 4.8)
    assert (smallest_value(0.5), smallest_value(AKIBA), smallest_value(CODREANU_MAIN)) == (0.5, 0.0128, 0.0)
