"""Batch-norm statistics for evaluation that do not depend on how many workers trained.

In training every batch-norm sees one ghost batch. Statistics for evaluation are defined by updates, not by workers:
after an update, `running = (1 - newest_share) * running + newest_share * average`, where `average` is the mean of
the ghost batches' means and variances over ALL ghost batches of the update. With `newest_share = 1` there is no moving
average: only the last update counts (Akiba 2017, section 2.3 of that paper's method).

The rule is linear, so each worker keeps just the part that its own ghost batches contribute and the parts are added up
only when somebody looks: before an evaluation or a checkpoint. No communication happens in training steps, every
worker ends with identical statistics, and 1, 3 or 4096 workers agree up to rounding. Parts are kept in float64, so the
order of that addition does not show in the float32 result.

Works on any model with torch's BatchNorm modules; buffers keep their usual names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["GhostStatistics"]


class GhostStatistics:
    """Collects the statistics of all batch-norms of `model` over ghost batches, updates and workers."""

    def __init__(self, model: nn.Module, newest_share: float) -> None:
        self.newest_share = newest_share
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        for norm in norms:
            # torch then overwrites the buffers with the newest ghost batch, which is what `after_ghost` reads.
            norm.momentum = 1.0
        self._buffers: list[Tensor] = []
        for norm in norms:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            self._buffers += [norm.running_mean, norm.running_var]
        self._counters = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        self._newest = [torch.zeros_like(b, dtype=torch.float64) for b in self._buffers]
        # What this worker contributes; before the first update rank 0 holds torch's initial values for all.
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._part = [b.to(torch.float64, copy=True) * float(first) for b in self._buffers]
        self._updates = 0

    def after_ghost(self, share_of_update: float) -> None:
        """Take in the ghost batch whose forward pass has just ended; `share_of_update` is 1 / ghosts of the update."""
        if self._buffers:
            doubles = [b.to(torch.float64) for b in self._buffers]
            torch._foreach_add_(self._newest, doubles, alpha=share_of_update)

    def after_update(self) -> None:
        """Move the running average by the update that has just ended."""
        self._updates += 1
        if self._buffers:
            torch._foreach_mul_(self._part, 1.0 - self.newest_share)
            torch._foreach_add_(self._part, self._newest, alpha=self.newest_share)
            self.forget_update()

    def forget_update(self) -> None:
        """Drop what was collected since the last update."""
        if self._newest:
            torch._foreach_zero_(self._newest)

    @torch.no_grad()
    def publish(self) -> None:
        """Add up all workers' parts and write the result into the model's buffers, the same on every worker."""
        if not self._buffers:
            return
        flat = self._added_up()
        for buffer, values in zip(self._buffers, flat.split([b.numel() for b in self._buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))
        for counter in self._counters:
            counter.fill_(self._updates)

    def _added_up(self) -> Tensor:
        if not self._part:
            return torch.zeros(0, dtype=torch.float64)
        flat = torch.cat([part.reshape(-1) for part in self._part])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
        return flat

    def state(self) -> dict[str, Tensor | int]:
        """The statistics of all workers together, for a checkpoint; every worker must call it.

        Parts are regrouped as `load` will group them, so that the run that goes on and the run that is resumed from
        the checkpoint add up the same numbers in the same order.
        """
        state: dict[str, Tensor | int] = {"running": self._added_up(), "updates": self._updates}
        self.load(state)
        return state

    def load(self, state: dict[str, Tensor | int]) -> None:
        """Continue from `state`, on any number of workers: rank 0 takes the whole, the others start from nothing."""
        flat, updates = state["running"], state["updates"]
        assert isinstance(flat, Tensor)
        assert isinstance(updates, int)
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._updates = updates
        for part, values in zip(self._part, flat.split([p.numel() for p in self._part]), strict=True):
            part.copy_(values.view_as(part) if first else torch.zeros_like(part))

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Within this block a forward pass leaves the model's buffers as they were."""
        saved = [b.clone() for b in (*self._buffers, *self._counters)]
        try:
            yield
        finally:
            for buffer, values in zip((*self._buffers, *self._counters), saved, strict=True):
                buffer.copy_(values)
