"""The comparison of a search with a grid, with the stand-in trainer of the tuning tests instead of training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.tune_grid import grid_rates, plan_of, run_grid, search
from tests.tune.conftest import toy_trainer

__all__ = ["toy_trainer"]


def test_the_grid_has_equal_factors_between_its_ends() -> None:
    rates = grid_rates(5)
    assert (rates[0], rates[-1]) == pytest.approx((0.125, 32.0))
    assert [after / before for before, after in pairwise(rates)] == pytest.approx([4.0] * 4)


@pytest.mark.usefixtures("toy_trainer")
def test_a_search_is_held_against_the_grid(tmp_path: Path) -> None:
    """The stand-in's accuracy falls by 5 points for every factor of 2 from 1.7, and a rate above 20 diverges."""
    generated = ("data.source=generated", "data.generated.channels=1", "data.generated.num_train=60_000")
    plan = plan_of(32, *generated)
    grid = run_grid(plan, [0.85, 1.7, 32.0], tmp_path)
    assert list(grid.values()) == pytest.approx([0.85 - 0.1 / 32, 0.9 - 0.1 / 32, 0.0])
    found = search(plan, 1, 4, grid, tmp_path / "search")
    assert found.points_below_grid >= 0
    assert 0 < found.share_of_images < 4 * (1 + 1 / 3 + 1 / 9) / 3
    assert found.overhead > 0
