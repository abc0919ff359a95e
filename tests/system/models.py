"""A stranger's network, for `model.name = "package.module:function"`; dropout makes it depend on random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def tiny(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )  # fmt: skip


def synchronised(num_classes: int, in_channels: int) -> nn.Module:
    network: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(tiny(num_classes, in_channels))
    return network


class Stumbling(nn.Module):
    """A network whose input is infinite once, in forward pass `BAD_PASS` of training: the run must get over it."""

    BAD_PASS = 13  # one warm-up pass, then five ghost batches a step on one worker: in step 3

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.network = tiny(num_classes, in_channels)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        logits: Tensor = self.network(images / 0.0 if self.training and self.passes == self.BAD_PASS else images)
        return logits


class NoisySGD(torch.optim.SGD):
    """Draws random numbers in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p), alpha=1e-3)
        super().step(closure)
