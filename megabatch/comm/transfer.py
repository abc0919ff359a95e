"""A few numbers between host and device, without a wait.

A copy between host and device blocks the host until the device has done all that was queued before, unless the host's
memory is pinned and the copy is told not to block. So numbers go up through pinned memory, and what comes down is
read later, when the device has long passed that point: `Reading` waits for its own copy and for nothing queued since.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """The numbers as a tensor on the device."""
    return send(torch.tensor(numbers, dtype=dtype), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device."""
    if device.type == "cpu":
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


class Reading:
    """Numbers on their way to the host, from a tensor that is not changed afterwards on a CPU."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._event = numbers, None
        if numbers.device.type != "cpu":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def list(self) -> list[float]:
        """The numbers; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._host.tolist()
        return found
