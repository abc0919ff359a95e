"""Gradients to integers and back by operations of torch, for accelerators and where there is no compiled helper.

All tensors of a bucket go through the same few kernels: they are handled as one long row of numbers, with the factor of
its tensor beside each number. Shifts are read where they lie; the host knows none of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megabatch.comm.shifts import power_of_two
from megabatch.comm.transfer import upload


class InTorch:
    """What `ExactSums` does with tensors of these sizes, in the order of its parameters."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._lists: dict[tuple[int, ...], Tensor] = {}  # lists of numbers on the device, sent there once
        self._found: list[tuple[list[int], Tensor]] = []  # of the present pass: places, and bits of largest magnitudes
        self._up, self._down = torch.ones(2, len(sizes), device=device).unbind()

    def begin_step(self, shifts: Tensor, num_ghosts: int) -> None:
        """Go by these shifts from now on."""
        self._found.clear()
        self._up.copy_(power_of_two(shifts))
        self._down.copy_(power_of_two(-shifts) / num_ghosts)

    def to_integers(
        self, places: list[int], gradients: list[Tensor], totals: list[Tensor] | None, results: list[Tensor]
    ) -> None:
        """results = totals + round(gradients * 2^shift); every tensor once a pass."""
        found = torch.stack(torch._foreach_norm(gradients, math.inf)).abs().view(torch.int32)
        self._found.append((places, found))
        integers = (_joined(gradients) * self._spread(self._up, places)).round_().to(torch.int32)
        if totals is not None:
            integers += _joined(totals)
        _put(integers, results)

    def to_floats(self, places: list[int], gradients: list[Tensor]) -> None:
        """gradients = integers in the same memory * 2^-shift / number of ghost batches."""
        integers = _joined([gradient.view(torch.int32) for gradient in gradients])
        _put(integers * self._spread(self._down, places), gradients)

    def end_pass(self, largest: Tensor) -> None:
        """Raise `largest`, by place, to what has been found in the pass."""
        if not self._found:
            return
        places = [place for some, _ in self._found for place in some]
        found = [bits for _, bits in self._found]
        self._found = []
        if rest := sorted(set(range(len(self._sizes))).difference(places)):
            found.append(largest.new_zeros(len(rest)))
        order = sorted(range(len(self._sizes)), key=(places + rest).__getitem__)
        torch.maximum(largest, torch.cat(found)[self._on_device(order)], out=largest)

    def _spread(self, factors: Tensor, places: list[int]) -> Tensor:
        """Each tensor's factor, as often as it has elements."""
        sizes = [self._sizes[place] for place in places]
        picked = factors[self._on_device(places)]
        return torch.repeat_interleave(picked, self._on_device(sizes), output_size=sum(sizes))

    def _on_device(self, numbers: list[int]) -> Tensor:
        key = tuple(numbers)
        if key not in self._lists:
            self._lists[key] = upload(numbers, self._device, torch.int64)
        return self._lists[key]


def _joined(tensors: list[Tensor]) -> Tensor:
    """Flat tensors as one: a view where they lie one behind the other, as in a bucket, else a copy."""
    view = _view_of_all(tensors)
    return torch.cat(tensors) if view is None else view


def _put(values: Tensor, results: list[Tensor]) -> None:
    """Write values into results that together are as long."""
    view = _view_of_all(results)
    if view is None:
        torch._foreach_copy_(results, list(values.split([result.numel() for result in results])))
    else:
        view.copy_(values)


def _view_of_all(tensors: list[Tensor]) -> Tensor | None:
    first = tensors[0]
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage()._cdata != storage or tensor.storage_offset() != end:
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
