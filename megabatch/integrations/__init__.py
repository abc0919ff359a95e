"""One line for a model that another library has put into `DistributedDataParallel`."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import GradientHook, gradient_hook

__all__ = ["register"]


def register(
    model: DistributedDataParallel,
    algorithm: str = "torus",
    *,
    grid: str | None = None,
    grad_dtype: torch.dtype | None = None,
) -> tuple[ProcessGrid, GradientHook]:
    """Average the gradients of `model` by `algorithm`; every rank must call it, before the first backward pass."""
    built = ProcessGrid.build(grid)
    state, hook = gradient_hook(built, algorithm, grad_dtype=grad_dtype)
    model.register_comm_hook(state, hook)
    return built, state
