"""Lightning: gradients of `Trainer(strategy="ddp")` over a 2D torus.

trainer = Trainer(strategy="ddp", callbacks=[TorusCallback()])
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.grid import ProcessGrid
from megabatch.comm.hook import GradientHook
from megabatch.errors import ConfigError
from megabatch.integrations import register

__all__ = ["TorusCallback"]


class TorusCallback(Callback):
    """Registers `megabatch.gradient_hook` when training starts, and closes it at the end.

    algorithm, grad_dtype: of `gradient_hook`. grid: of `ProcessGrid.build`, one row per host by default. On one device
    there is nothing to do.
    """

    def __init__(
        self, algorithm: str = "torus", *, grid: str | None = None, grad_dtype: torch.dtype | None = None
    ) -> None:
        self.algorithm, self.grid_shape, self.grad_dtype = algorithm, grid, grad_dtype
        self.grid: ProcessGrid | None = None
        self.hook: GradientHook | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size == 1:
            return
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"the strategy {type(trainer.strategy).__name__} was given, TorusCallback needs DDP; "
                'make the Trainer with strategy="ddp"'
            )
        self.grid, self.hook = register(model, self.algorithm, grid=self.grid_shape, grad_dtype=self.grad_dtype)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.hook is not None and self.grid is not None:
            self.hook.close()
            self.grid.close()
            self.hook = self.grid = None
