"""A moving average of a model's weights (EMA) whose half-life is counted in images.

    average.update(512)          # after a step of 512 images
    average.model                # a copy of the model with the averaged weights

A step of n images weighs 1 - 2^(-n / half_life), and the weights of all steps before are halved every half_life images.
So the average means the same at every batch, and through a change of it; a decay per step, as torch's `swa_utils` has
it, does not. The sum of all weights so far is divided out: the initial weights have no part in the average.

Averaged weights make other activations than any of those they come from, so their batch-norm statistics must be
measured anew before they are used: `megabatch.exact_statistics`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.errors import ConfigError

__all__ = ["WeightAverage"]


class WeightAverage:
    """The moving average of the weights of `model`, which is trained elsewhere.

    Args:
        model: without DDP around it.
        half_life_samples: images after which a step weighs half of what it did.

    Raises:
        ConfigError: a half-life that is not above 0.
    """

    def __init__(self, model: nn.Module, half_life_samples: float) -> None:
        if not 0 < half_life_samples < float("inf"):
            raise ConfigError(f"WeightAverage half_life_samples {half_life_samples:g} must be above 0 and finite")
        self.model = deepcopy(model).requires_grad_(False)
        self.half_life_samples = half_life_samples
        self._samples: int | Tensor = 0  # images of the steps that are in the average
        self._own: list[Tensor] = list(self.model.parameters())
        self._trained: list[Tensor] = list(model.parameters())
        self._buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, num_samples: int, *, unless: Tensor | None = None) -> None:
        """Add the weights as they are now, after a step of so many images.

        unless: a truth on the device, which nobody has to wait for: where it is true, the step was left out.
        """
        if unless is not None:
            self._update_on_device(num_samples, unless)
            return
        self._samples += num_samples
        share = self._weight(num_samples) / self._weight(self._samples)
        if share == 1.0:  # the first step; what was there before may not even be finite
            torch._foreach_copy_(self._own, self._trained)
        else:
            torch._foreach_lerp_(self._own, self._trained, share)

    @torch.no_grad()
    def copy_buffers(self) -> None:
        """Take over what the trained model has besides weights."""
        for own, trained in self._buffers:
            own.copy_(trained)

    def state_dict(self) -> dict[str, Any]:
        """The average and how far it has come. Tensors are the live ones."""
        return {"samples": int(self._samples), "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._samples = int(state["samples"])
        self.model.load_state_dict(state["model"])

    def _update_on_device(self, num_samples: int, unless: Tensor) -> None:
        if isinstance(self._samples, int) and self._samples == 0:
            torch._foreach_copy_(self._own, self._trained)  # what was there before may not even be finite
        counts = unless.logical_not()
        self._samples = self._samples + counts * num_samples
        of_all: Tensor = 1.0 - torch.exp2(-self._samples.double() / self.half_life_samples)
        share = torch.where(counts, self._weight(num_samples) / of_all, 0.0).to(torch.float32)
        torch._foreach_mul_(self._own, 1.0 - share)
        torch._foreach_add_(self._own, torch._foreach_mul(self._trained, share))

    def _weight(self, samples: int | Tensor) -> float:
        return float(1.0 - 2.0 ** (-samples / self.half_life_samples))
