"""The split division: it is an average, and half precision survives 4096 ranks."""

from __future__ import annotations

import math

import pytest
import torch

from megabatch.comm.division import divisions
from megabatch.comm.phases import ALGORITHMS, num_lanes, phases


@pytest.mark.parametrize("half_precision", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (1, 5), (64, 64), (2, 3, 4)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_divisors_of_every_lane_multiply_to_the_number_of_ranks(
    algorithm: str, sizes: tuple[int, ...], half_precision: bool
) -> None:
    phase_list = phases(algorithm, sizes)
    divided = divisions(phase_list, half_precision=half_precision)
    for lane in range(num_lanes(phase_list)):
        factors = [
            division.before * division.after
            for phase, division in zip(phase_list, divided, strict=True)
            if phase.lane == lane
        ]
        assert math.prod(factors) == math.prod(sizes)


def test_torus_divides_by_x_before_rows_and_by_y_before_columns() -> None:
    row, column, gather = divisions(phases("torus", (32, 64)), half_precision=True)
    assert (row.before, column.before, gather.before) == (64, 32, 1)
    assert (row.after, column.after, gather.after) == (1, 1, 1)


def _torus_in_half(values: torch.Tensor, before_row: float, before_column: float, after: float) -> torch.Tensor:
    """Sum `values[row, column]` in float16 hop by hop in the order of the torus, with the given divisors."""
    rows, columns = values.shape[:2]
    in_rows = values.half() / before_row
    row_sums = in_rows[:, 0]
    for column in range(1, columns):
        row_sums = row_sums + in_rows[:, column]
    in_columns = row_sums / before_column
    total = in_columns[0]
    for row in range(1, rows):
        total = total + in_columns[row]
    return total / after


@pytest.mark.parametrize("magnitude", [2e-5, 1e-3, 1.0, 1000.0, 60000.0])
def test_half_precision_survives_4096_ranks_where_other_divisions_fail(magnitude: float) -> None:
    generator = torch.Generator().manual_seed(7)
    values = magnitude * (0.9 + 0.1 * torch.rand(64, 64, 5, generator=generator))
    exact = values.half().double().mean(dim=(0, 1))
    row, column, _ = divisions(phases("torus", (64, 64)), half_precision=True)
    average = _torus_in_half(values, row.before, column.before, 1)
    # 126 roundings of half a unit in the last place; and values below 64 * 6.1e-5 become subnormal when divided,
    # where each of the 64 terms of both sums is off by up to 2**-25.
    torch.testing.assert_close(average.double(), exact, rtol=126 * 2**-11, atol=128 * 2**-25)
    assert (average > 0).all()

    divided_after = _torus_in_half(values, 1, 1, 4096)
    divided_first = _torus_in_half(values, 4096, 1, 1)
    if magnitude >= 1000:
        assert torch.isinf(divided_after).all()
    if magnitude <= 2e-5:
        assert (divided_first == 0).all()


def test_crossing_the_world_at_once_divides_half_before_and_half_after() -> None:
    (flat,) = divisions(phases("ring", (64, 64)), half_precision=True)
    assert (flat.before, flat.after) == (64, 64)
    (odd,) = divisions(phases("ring", (1, 6)), half_precision=True)
    assert odd.before * odd.after == 6
    (whole,) = divisions(phases("ring", (64, 64)), half_precision=False)
    assert (whole.before, whole.after) == (1, 4096)
