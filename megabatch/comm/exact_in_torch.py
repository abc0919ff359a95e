"""Gradients to integers and back by operations of torch, for accelerators and where there is no compiled helper.

All tensors of a bucket go through the same few kernels: they are handled as one long row of numbers, with the factor of
its tensor beside each number. Shifts are read where they lie; the host knows none of them.

The factors of all numbers are spread out once a step, in the order in which buckets hold their tensors. DDP shows that
order in the first steps; until then each bucket's are spread out by themselves. So nothing is sent to the device in a
pass that is not among the first ones: a pass may be part of a graph.
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
        self._found: list[tuple[list[int], tuple[Tensor, ...]]] = []  # of this pass: places, and largest magnitudes
        self._buckets: list[list[int]] = []  # of this step: places in the order of memory
        self._up, self._share = torch.ones(len(sizes), device=device), torch.ones((), device=device)
        self.order: list[int] = []  # of places, as buckets have them; empty until they are known
        self._ranks, self._starts = list[int](), list[int]()  # of places, and of numbers, in that order
        self._factors = torch.zeros(0, device=device)  # of all numbers, in that order
        self._lists: dict[tuple[int, ...], Tensor] = {}  # lists of numbers on the device, sent there once

    def begin_step(self, shifts: Tensor, num_ghosts: int) -> bool:
        """Go by these shifts from now on; returns whether `order` has changed."""
        self._found.clear()
        self._up.copy_(power_of_two(shifts))
        self._share.fill_(1.0 / num_ghosts)
        is_new = not all(self._is_run(bucket) for bucket in self._buckets)
        if is_new:
            self._lay(list(dict.fromkeys(place for bucket in self._buckets for place in bucket)))
        self._buckets.clear()
        if self.order:
            torch.index_select(*self._spread_out(self.order), out=self._factors)
        return is_new

    def to_integers(
        self, places: list[int], gradients: list[Tensor], totals: list[Tensor] | None, results: list[Tensor]
    ) -> None:
        """results = totals + round(gradients * 2^shift); every tensor once a pass."""
        self._found.append((places, torch._foreach_norm(gradients, math.inf)))
        if self.order:
            by_rank = sorted(range(len(places)), key=lambda i: self._ranks[places[i]])
            places = [places[i] for i in by_rank]
            gradients, results = [gradients[i] for i in by_rank], [results[i] for i in by_rank]
            totals = totals and [totals[i] for i in by_rank]
        _put((_joined(gradients) * self._factors_of(places)).round_(), totals, results)

    def to_floats(self, places: list[int], gradients: list[Tensor]) -> None:
        """gradients = integers in the same memory * 2^-shift / number of ghost batches.

        Dividing by a power of two rounds nothing: the bits are those of one multiplication by both.
        """
        self._buckets.append(places)
        means = _joined([gradient.view(torch.int32) for gradient in gradients]) * self._share
        view = _view_of_all(gradients)
        if view is None:
            _put(means / self._factors_of(places), None, gradients)
        else:
            torch.div(means, self._factors_of(places), out=view)

    def end_pass(self, largest: Tensor) -> None:
        """Raise `largest`, by place, to the bits of what has been found in the pass."""
        if not self._found:
            return
        found = {place: one for places, ones in self._found for place, one in zip(places, ones, strict=True)}
        self._found = []
        nothing = self._share if len(found) == len(self._sizes) else torch.zeros((), device=self._device)
        all_found = torch.stack([found.get(place, nothing) for place in range(len(self._sizes))])
        torch.maximum(largest, all_found.abs_().view(torch.int32), out=largest)

    def _lay(self, places: list[int]) -> None:
        """Take over the order in which buckets hold their tensors; those that are in none come last."""
        self.order = places + sorted(set(range(len(self._sizes))).difference(places))
        sizes = [self._sizes[place] for place in self.order]
        self._ranks, self._starts = [0] * len(sizes), [0]
        for rank, (place, size) in enumerate(zip(self.order, sizes, strict=True)):
            self._ranks[place] = rank
            self._starts.append(self._starts[-1] + size)
        self._factors = torch.zeros(sum(sizes), device=self._device)

    def _is_run(self, places: list[int]) -> bool:
        """Whether these tensors follow one another in `order`."""
        first = self._ranks[places[0]] if self.order else 0
        return places == self.order[first : first + len(places)]

    def _factors_of(self, places: list[int]) -> Tensor:
        """Each tensor's 2^shift, as often as it has elements."""
        if self._is_run(places):
            first = self._ranks[places[0]]
            return self._factors[self._starts[first] : self._starts[first + len(places)]]
        return torch.index_select(*self._spread_out(places))

    def _spread_out(self, places: list[int]) -> tuple[Tensor, int, Tensor]:
        """What `index_select` makes these tensors' factors of."""
        sizes = [self._sizes[place] for place in places]
        numbers = torch.repeat_interleave(self._on_device(sizes), output_size=sum(sizes))
        return self._up[self._on_device(places)], 0, numbers

    def _on_device(self, numbers: list[int]) -> Tensor:
        key = tuple(numbers)
        if key not in self._lists:
            self._lists[key] = upload(numbers, self._device, torch.int32)  # half as long, spread out, as by int64
        return self._lists[key]


def _joined(tensors: list[Tensor]) -> Tensor:
    """Flat tensors as one: a view where they lie one behind the other, as in a bucket, else a copy."""
    view = _view_of_all(tensors)
    return torch.cat(tensors) if view is None else view


def _put(values: Tensor, totals: list[Tensor] | None, results: list[Tensor]) -> None:
    """results = totals + values, which are rounded where results are integers; totals may be the results."""
    view = _view_of_all(results)
    if view is not None and totals is None:
        view.copy_(values)
    elif view is not None and totals is not None:
        torch.add(_joined(totals), values.to(view.dtype), out=view)
    else:
        values = values.to(results[0].dtype)
        values = values if totals is None else values.add_(_joined(totals))
        torch._foreach_copy_(results, list(values.split([result.numel() for result in results])))


def _view_of_all(tensors: list[Tensor]) -> Tensor | None:
    first = tensors[0]
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage()._cdata != storage or tensor.storage_offset() != end:
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
