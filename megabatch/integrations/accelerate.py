"""accelerate: gradients of a prepared model over a 2D torus.

model, optimizer = accelerator.prepare(model, optimizer)
use_torus(accelerator, model)
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.grid import ProcessGrid
from megabatch.errors import ConfigError
from megabatch.integrations import register

__all__ = ["use_torus"]


def use_torus(
    accelerator: Accelerator,
    model: nn.Module,
    algorithm: str = "torus",
    *,
    grid: str | None = None,
    grad_dtype: torch.dtype | None = None,
) -> ProcessGrid | None:
    """Average the gradients of a model that `accelerator.prepare` returned; on every process, before the first step.

    Returns the grid, or None where there is one process and nothing to average.

    Raises:
        ConfigError: a model that is not wrapped by DDP.
    """
    if accelerator.num_processes == 1:
        return None
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"a model of type {type(model).__name__} was given, use_torus needs one that accelerator.prepare has "
            "wrapped by DDP; call it after prepare, without FSDP or DeepSpeed"
        )
    return register(model, algorithm, grid=grid, grad_dtype=grad_dtype)[0]
