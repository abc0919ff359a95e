"""Batch-norm statistics for evaluation that do not depend on how many workers trained.

In training every batch-norm sees one ghost batch. Statistics for evaluation are defined by steps, not by workers:
after a step, `running = (1 - momentum) * running + momentum * average`, where `average` is the mean of
the ghost batches' means and variances over ALL ghost batches of the step. With `momentum = 1` there is no moving
average: only the last step counts (Akiba 2017, section 2.3 of that paper's method).

The rule is linear, so each worker keeps just the part that its own ghost batches contribute and the parts are added up
only when somebody looks: before an evaluation or a checkpoint. No communication happens in training steps, every
worker ends with identical statistics, and 1, 3 or 4096 workers agree up to rounding. Parts are kept in float64, so the
order of that addition does not show in the float32 result.

The variance is the plain average of the ghosts' variances, as in the paper, or pooled: average variance plus the
variance of the ghosts' means, which is what all images together have. Pooled statistics keep averages of
variance + mean^2, which is linear too; with a moving average the pool is the past steps by their weights.

`exact_statistics` needs no past at all: forward passes of the weights as they are.

Works on any model with torch's BatchNorm modules; buffers keep their usual names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["GhostStatistics", "Variance", "exact_statistics"]

Variance = Literal["plain", "pooled"]


class GhostStatistics:
    """Collects the statistics of all batch-norms of `model` over ghost batches, steps and workers."""

    def __init__(self, model: nn.Module, momentum: float, variance: Variance = "plain") -> None:
        self.momentum = momentum
        self._pooled = variance == "pooled"
        norms = _norms_of(model)
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
        # What this worker contributes; before the first step rank 0 holds torch's initial values for all.
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._part = [b.to(torch.float64, copy=True) * float(first) for b in self._buffers]
        self._steps = 0

    def after_ghost(self, share_of_step: float) -> None:
        """Take in the ghost batch whose forward pass has just ended; `share_of_step` is 1 / ghosts of the step."""
        if self._buffers:
            doubles = [b.to(torch.float64) for b in self._buffers]
            if self._pooled:
                means, variances = doubles[::2], doubles[1::2]
                torch._foreach_addcmul_(variances, means, means)
            torch._foreach_add_(self._newest, doubles, alpha=share_of_step)

    def after_step(self) -> None:
        """Move the running average by the step that has just ended."""
        self._steps += 1
        if self._buffers:
            torch._foreach_mul_(self._part, 1.0 - self.momentum)
            torch._foreach_add_(self._part, self._newest, alpha=self.momentum)
            self.forget_step()

    def forget_step(self) -> None:
        """Drop what was collected since the last step."""
        if self._newest:
            torch._foreach_zero_(self._newest)

    def forget_bad_step(self) -> None:
        """Drop a step that was not finite, from the model's buffers too.

        torch computes `(1 - 1) * old + 1 * new` for the next ghost batch, and 0 times infinity would never go away.
        """
        self.forget_step()
        if self._buffers:
            torch._foreach_zero_(self._buffers)

    @torch.no_grad()
    def publish(self) -> None:
        """Add up all workers' parts and write the result into the model's buffers, the same on every worker."""
        if not self._buffers:
            return
        parts = self._added_up().split([b.numel() for b in self._buffers])
        for index, (buffer, values) in enumerate(zip(self._buffers, parts, strict=True)):
            if self._pooled and index % 2:
                values = (values - parts[index - 1].square()).clamp_min(0.0)
            buffer.copy_(values.view_as(buffer))
        for counter in self._counters:
            counter.fill_(self._steps)

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
        state: dict[str, Tensor | int] = {"running": self._added_up(), "steps": self._steps}
        self.load(state)
        return state

    def load(self, state: dict[str, Tensor | int]) -> None:
        """Continue from `state`, on any number of workers: rank 0 takes the whole, the others start from nothing."""
        flat, steps = state["running"], state["steps"]
        assert isinstance(flat, Tensor)
        assert isinstance(steps, int)
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._steps = steps
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


@torch.no_grad()
def exact_statistics(
    model: nn.Module, batches: Iterable[Tensor], share_of_all: float, variance: Variance = "pooled"
) -> None:
    """Give all batch-norms of `model` the statistics of its present weights over batches of all workers.

    Every worker must call it with its own batches, possibly none; `share_of_all` is 1 / batches of all workers
    together. All workers end with the same numbers. Only batch-norms are in training mode while it lasts: what they see
    is what they will see in evaluation.
    """
    norms = _norms_of(model)
    modes = [(module, module.training) for module in model.modules()]
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    counts = [None if counter is None else counter.clone() for _, _, counter in kept]
    try:
        model.eval()
        for norm in norms:
            norm.train()
        statistics = GhostStatistics(model, 1.0, variance)
        for batch in batches:
            model(batch)
            statistics.after_ghost(share_of_all)
        statistics.after_step()
        statistics.publish()
    finally:
        for module, training in modes:
            module.training = training
        for (norm, momentum, counter), count in zip(kept, counts, strict=True):
            norm.momentum = momentum
            if counter is not None and count is not None:
                counter.copy_(count)


def _norms_of(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
