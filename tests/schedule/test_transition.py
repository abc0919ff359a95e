"""The share of SGD against the values worked out by hand from the paper's formula."""

from __future__ import annotations

import math

import pytest

from megabatch.schedule.transition import sgd_share, transition_ends


@pytest.mark.parametrize(
    ("epoch", "share", "printed"),
    [
        (0, 0.0092, 0.0092),
        (2, 0.0204, 0.0204),
        (5, 0.0677, 0.0677),
        (8, 0.2247, 0.2247),
        (10, 0.5, 0.5),
        (11, 0.7, 0.9),
        (12, 0.9, 1.3),
        (12.5, 1.0, 1.0),
        (90, 1.0, 1.0),
    ],
)
def test_values_of_the_paper(epoch: float, share: float, printed: float) -> None:
    assert sgd_share(epoch) == pytest.approx(share, abs=5e-5)
    assert sgd_share(epoch, literal=True) == pytest.approx(printed, abs=5e-5)


def test_the_transition_is_continuous_and_smooth_at_the_center_and_the_printed_one_jumps() -> None:
    tiny = 1e-7
    for joint in (10.0, transition_ends(10.0, 5.0)):
        assert sgd_share(joint - tiny) == pytest.approx(sgd_share(joint), abs=1e-6)
    before = (sgd_share(10.0) - sgd_share(10.0 - 1e-4)) / 1e-4
    after = (sgd_share(10.0 + 1e-4) - sgd_share(10.0)) / 1e-4
    assert before == pytest.approx(after, rel=1e-3)
    assert after == pytest.approx(1 / 5)
    assert sgd_share(12.5 - tiny, literal=True) == pytest.approx(1.5, abs=1e-6)


def test_center_and_period_move_and_stretch_it() -> None:
    assert transition_ends(3.0, 2.0) == 4.0
    assert sgd_share(4.0, 3.0, 2.0) == 1.0
    assert sgd_share(3.5, 3.0, 2.0) == 0.75
    assert sgd_share(2.0, 3.0, 2.0) == pytest.approx(0.5 * math.exp(-1.0))
