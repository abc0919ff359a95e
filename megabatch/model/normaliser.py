"""From images as they are read to what a network takes: float numbers around zero, laid out as its weights are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megabatch.config import Config
from megabatch.errors import ConfigError


class Normaliser(nn.Module):
    """uint8 [n, height, width, channels] images -> float network input on its device, in one pass over the batch."""

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, channels_last: bool) -> None:
        super().__init__()
        self._channels_last = channels_last
        means, stds = torch.tensor(mean), torch.tensor(std)
        self.register_buffer("scale", (1.0 / (255.0 * stds)).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("shift", -(means / stds).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if images.device != self.scale.device:  # an exported model must not hold a device
            images = images.to(self.scale.device, non_blocking=True)
        batch = images.permute(0, 3, 1, 2).to(torch.float32, copy=True)  # never the memory that was given
        if not self._channels_last:
            batch = batch.contiguous()
        return batch.mul_(self.scale).add_(self.shift)


def normaliser_of(config: Config, channels: int, device: torch.device) -> Normaliser:
    """That of a recipe, for images of so many channels; ConfigError when its means do not fit them."""
    mean, std = config.data.mean, config.data.std
    if len(mean) not in (1, channels):
        raise ConfigError(
            f"data.mean has {len(mean)} values but images have {channels} channels; give one, or one per channel"
        )
    return Normaliser(mean, std, channels_last=config.train.channels_last).to(device)
