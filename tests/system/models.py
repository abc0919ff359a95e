"""A stranger's network, for `model.name = "package.module:function"`; dropout makes it depend on random numbers."""

from __future__ import annotations

from torch import nn


def tiny(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )  # fmt: skip


def synchronised(num_classes: int, in_channels: int) -> nn.Module:
    network: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(tiny(num_classes, in_channels))
    return network
