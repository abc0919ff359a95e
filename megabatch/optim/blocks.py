"""Gradients as equal blocks, and what Shampoo computes for each: statistics of every dimension, and their roots.

A parameter's small neighbouring dimensions are merged ([64, 64, 3, 3] becomes [64, 64, 9]), and each dimension that is
left is cut into the fewest equal parts of at most `block_size` (1000 into 8 of 125). A dimension that cannot be cut
evenly is filled up with zeros, which neither change the rest nor come back. All blocks of a parameter have one shape,
so one batched product serves them all. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def merged_shape(shape: Sequence[int], block_size: int) -> tuple[int, ...]:
    """The shape with neighbours merged from the right as long as they fit into one block."""
    merged: list[int] = []
    for size in reversed(shape):
        if merged and merged[0] * size <= block_size:
            merged[0] *= size
        else:
            merged.insert(0, size)
    return tuple(merged) or (1,)


def to_blocks(tensor: Tensor, block_size: int) -> Tensor:
    """The tensor as [number of blocks, *shape of a block]."""
    shape = merged_shape(tensor.shape, block_size)
    counts, sizes = _cuts(shape, block_size)
    whole = tensor.reshape(shape)
    lacking = [count * size - length for count, size, length in zip(counts, sizes, shape, strict=True)]
    if any(lacking):
        whole = F.pad(whole, [pad for last in reversed(lacking) for pad in (0, last)])
    num_dims = len(shape)
    cut = whole.reshape([part for pair in zip(counts, sizes, strict=True) for part in pair])
    return cut.permute([*range(0, 2 * num_dims, 2), *range(1, 2 * num_dims, 2)]).reshape(-1, *sizes)


def from_blocks(blocks: Tensor, like: Tensor, block_size: int) -> Tensor:
    """What `to_blocks` took apart, in the shape of `like`."""
    shape = merged_shape(like.shape, block_size)
    counts, sizes = _cuts(shape, block_size)
    num_dims = len(shape)
    order = [place for pair in zip(range(num_dims), range(num_dims, 2 * num_dims), strict=True) for place in pair]
    filled = [count * size for count, size in zip(counts, sizes, strict=True)]
    whole = blocks.reshape(*counts, *sizes).permute(order).reshape(filled)
    return whole[tuple(slice(length) for length in shape)].reshape(like.shape)


def _cuts(shape: Sequence[int], block_size: int) -> tuple[list[int], list[int]]:
    """How many parts each dimension has, and how long they are."""
    counts = [math.ceil(length / block_size) for length in shape]
    return counts, [math.ceil(length / count) for length, count in zip(shape, counts, strict=True)]


def new_statistics(blocks: Tensor) -> list[Tensor]:
    """Zeros: one matrix for each dimension of each block."""
    return [blocks.new_zeros(blocks.shape[0], size, size) for size in blocks.shape[1:]]


def add_statistics(statistics: Sequence[Tensor], blocks: Tensor, beta2: float) -> None:
    """L = beta2 * L + (1 - beta2) * G G', for every dimension with G unfolded along it."""
    for dim, matrices in enumerate(statistics):
        unfolded = blocks.movedim(dim + 1, 1).reshape(*matrices.shape[:2], -1)
        matrices.baddbmm_(unfolded, unfolded.mT, beta=beta2, alpha=1.0 - beta2)


def precondition(blocks: Tensor, roots: Sequence[Tensor]) -> Tensor:
    """The blocks multiplied by their root along every dimension."""
    for dim, matrices in enumerate(roots):
        moved = blocks.movedim(dim + 1, 1)
        blocks = torch.bmm(matrices, moved.reshape(*matrices.shape[:2], -1)).reshape(moved.shape).movedim(1, dim + 1)
    return blocks


def inverse_root(matrix: Tensor, root: int, eps: float) -> Tensor:
    """(L + eps * largest eigenvalue)^(-1 / root) of one symmetric matrix, through its eigenvalues in float64.

    The identity when there is nothing but zeros. What is not finite gives NaN: such a run has diverged, and its loss
    says so. One matrix at a time: the bits of a batched call could depend on the place in the batch.
    """
    exact = matrix.to(torch.float64)
    if not torch.isfinite(exact).all():
        return torch.full_like(matrix, math.nan)
    values, vectors = torch.linalg.eigh(exact)
    largest = values[-1]
    if not largest > 0:
        return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    powers = (values.clamp(min=0.0) + eps * largest) ** (-1.0 / root)
    result: Tensor = (vectors * powers) @ vectors.mT
    return result.to(matrix.dtype)
