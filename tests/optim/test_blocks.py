"""Cutting into blocks and back, and roots against scipy's matrix powers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import fractional_matrix_power

from megabatch.optim.blocks import (
    add_statistics,
    from_blocks,
    inverse_root,
    merged_shape,
    new_statistics,
    precondition,
    to_blocks,
)


@pytest.mark.parametrize(
    ("shape", "merged"),
    [
        ((64, 64, 3, 3), (64, 64, 9)),
        ((64, 3, 7, 7), (64, 3, 49)),
        ((1000, 2048), (1000, 2048)),
        ((256, 64, 1, 1), (256, 64)),
        ((8, 1, 3, 3), (72,)),
        ((7,), (7,)),
        ((), (1,)),
    ],
)
def test_small_neighbours_are_merged(shape: tuple[int, ...], merged: tuple[int, ...]) -> None:
    assert merged_shape(shape, 128) == merged


@pytest.mark.parametrize("shape", [(5,), (12,), (10, 7), (9, 4, 3, 3), (3, 2, 11, 1), ()])
def test_blocks_are_small_and_go_back_to_what_they_were(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    blocks = to_blocks(tensor, 4)
    assert max(blocks.shape[1:]) <= 4
    assert torch.equal(from_blocks(blocks, tensor, 4), tensor)
    assert torch.equal(
        blocks.flatten().sort().values[blocks.flatten().sort().values != 0], tensor.flatten().sort().values
    )


def test_a_block_is_a_part_of_the_matrix() -> None:
    tensor = torch.arange(60.0).reshape(6, 10)
    blocks = to_blocks(tensor, 4)  # 2 x 3 blocks of 3 x 4; the last columns are filled up
    assert torch.equal(blocks[1], tensor[:3, 4:8])
    assert torch.equal(blocks[5, :, :2], tensor[3:, 8:])
    assert not blocks[5, :, 2:].any()


def test_the_layout_in_memory_does_not_matter() -> None:
    tensor = torch.randn(6, 5, 3, 3)
    last = tensor.contiguous(memory_format=torch.channels_last)
    assert torch.equal(to_blocks(last, 4), to_blocks(tensor, 4))


def test_statistics_and_products_are_those_of_unfolded_blocks() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(2, 5, 3, 4, 2, dtype=torch.float64).unbind()
    statistics = new_statistics(first)
    add_statistics(statistics, first, 0.7)
    add_statistics(statistics, second, 0.7)
    for dim, letters in enumerate(("abcd,axcd->abx", "abcd,abxd->acx", "abcd,abcx->adx")):
        wanted = 0.7 * 0.3 * torch.einsum(letters, first, first) + 0.3 * torch.einsum(letters, second, second)
        torch.testing.assert_close(statistics[dim], wanted)
    one, two, three = statistics
    wanted = torch.einsum("abcd,axb,ayc,azd->axyz", first, one, two, three)
    torch.testing.assert_close(precondition(first, statistics), wanted)


@pytest.mark.parametrize("root", [2, 4, 6])
def test_roots_are_scipys(root: int) -> None:
    """Of a matrix of full rank, and of one with many eigenvalues of zero."""
    torch.manual_seed(1)
    for rank in (40, 3):
        factor = torch.randn(20, rank, dtype=torch.float64)
        matrix = factor @ factor.T
        damped = matrix.numpy() + 1e-4 * np.linalg.norm(matrix.numpy(), 2) * np.eye(20)
        wanted = torch.from_numpy(np.real(fractional_matrix_power(damped, -1 / root)))
        torch.testing.assert_close(inverse_root(matrix, root, 1e-4), wanted, rtol=1e-9, atol=1e-9)


def test_a_root_in_float32_is_as_exact_as_float32() -> None:
    """Eigenvalues over nine orders of magnitude, far more than float32 arithmetic could bear."""
    torch.manual_seed(2)
    basis = torch.linalg.qr(torch.randn(30, 30, dtype=torch.float64)).Q
    exact = (basis * torch.logspace(-9, 0, 30, dtype=torch.float64)) @ basis.T
    found = inverse_root(exact.float(), 4, 1e-5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), inverse_root(exact, 4, 1e-5), rtol=2e-3, atol=1e-2)
    torch.testing.assert_close(found.double(), inverse_root(exact.float().double(), 4, 1e-5), rtol=1e-6, atol=1e-6)


def test_nothing_but_zeros_has_the_identity_for_a_root_and_infinity_has_none() -> None:
    assert torch.equal(inverse_root(torch.zeros(3, 3), 4, 1e-6), torch.eye(3))
    assert inverse_root(torch.full((2, 2), torch.inf), 4, 1e-6).isnan().all()
