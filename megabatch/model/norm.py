"""Batch-norm statistics for evaluation that do not depend on how many ranks trained.

In training every batch-norm sees one ghost batch. Statistics for evaluation are defined by steps, not by ranks:
after a step, `running = (1 - momentum) * running + momentum * average`, where `average` is the mean of
the ghost batches' means and variances over ALL ghost batches of the step. With `momentum = 1` there is no moving
average: only the last step counts (Akiba 2017, section 2.3 of that paper's method).

The rule is linear, so each rank holds just the part that its own ghost batches contribute. The parts are added up
only before an evaluation or a checkpoint. No communication happens in training steps, every
rank ends with identical statistics, and 1, 3 or 4096 ranks agree up to rounding. Parts are float64 numbers, so the
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
    """Collects the statistics of all batch-norms of `model` over ghost batches, steps and ranks.

        statistics = GhostStatistics(model, momentum=0.1)
        with statistics.ghost(share_of_step=1 / num_ghosts):     # around each pass of training
            logits = ddp(images)
        ...
        optimizer.step()
        statistics.after_step()
        ...
        statistics.publish()                                     # before an evaluation, on every rank

    The model may be moved to another device at any time. Its own `momentum` values stay as they are.
    """

    def __init__(self, model: nn.Module, momentum: float, variance: Variance = "plain") -> None:
        self.momentum = momentum
        self._pooled = variance == "pooled"
        self._norms = _norms_of(model)
        self._newest = [torch.zeros_like(b, dtype=torch.float64) for b in self._buffers()]
        # What this rank contributes; before the first step rank 0 holds torch's initial values for all.
        self._part = [b.to(torch.float64, copy=True) * float(_rank() == 0) for b in self._buffers()]
        self._steps = 0
        self._whole: Tensor | None = None  # the parts of all ranks added up, as long as no step has come since

    @contextmanager
    def ghost(self, share_of_step: float) -> Iterator[None]:
        """Around a training pass: take in the statistics of its ghost batch; a share is 1 / ghosts of the step."""
        with self._newest_only():
            yield
        if self._norms:
            buffers = self._buffers()
            if self._part[0].device != buffers[0].device:
                self._newest = [newest.to(buffers[0].device) for newest in self._newest]
                self._part = [part.to(buffers[0].device) for part in self._part]
            doubles = [b.to(torch.float64) for b in buffers]
            if self._pooled:
                means, variances = doubles[::2], doubles[1::2]
                torch._foreach_addcmul_(variances, means, means)
            torch._foreach_add_(self._newest, doubles, alpha=share_of_step)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Around a forward and backward pass that must not count: the model's buffers stay as they were."""
        tensors = [*self._buffers(), *self._counters()]
        saved = [tensor.clone() for tensor in tensors]
        try:
            with self._newest_only():  # as in `ghost`: a compiled model then has one graph for both
                yield
        finally:
            for tensor, values in zip(tensors, saved, strict=True):
                tensor.copy_(values)

    def after_step(self) -> None:
        """Move the running average by the step that has just ended."""
        self._steps += 1
        self._whole = None
        if self._norms:
            torch._foreach_mul_(self._part, 1.0 - self.momentum)
            torch._foreach_add_(self._part, self._newest, alpha=self.momentum)
            torch._foreach_zero_(self._newest)

    def forget_step(self) -> None:
        """Drop what a step that was not finite has collected, from the model's buffers too.

        torch computes `(1 - 1) * old + 1 * new` for the next ghost batch, and 0 times infinity would never go away.
        """
        if self._norms:
            torch._foreach_zero_(self._newest)
            torch._foreach_zero_(self._buffers())

    @torch.no_grad()
    def publish(self) -> None:
        """Add up all ranks' parts and write the result into the model's buffers, the same on every rank."""
        buffers = self._buffers()
        parts = self._added_up().split([b.numel() for b in buffers])
        for index, (buffer, values) in enumerate(zip(buffers, parts, strict=True)):
            if self._pooled and index % 2:
                values = (values - parts[index - 1].square()).clamp_min(0.0)
            buffer.copy_(values.view_as(buffer))
        for counter in self._counters():
            counter.fill_(self._steps)

    def gather(self) -> None:
        """Add up the parts of all ranks, and let rank 0 go on with the whole; every rank must call it.

        A run that goes on and a run that is resumed then add up the same numbers in the same order.
        """
        if self._whole is None:
            self._take(self._added_up())

    def state_dict(self) -> dict[str, Tensor | int]:
        """The statistics of all ranks together, for a checkpoint, the same on every rank.

        Raises:
            RuntimeError: when there are several ranks and `gather` was not called since the last step.
        """
        if self._whole is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError("each rank holds a part of the statistics; call gather() on every rank first")
        return {"running": self._added_up() if self._whole is None else self._whole.clone(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continue from `state`, on any number of ranks; every rank loads the same."""
        flat, steps = state["running"], state["steps"]
        assert isinstance(flat, Tensor)
        assert isinstance(steps, int)
        self._steps = steps
        self._take(flat)

    @contextmanager
    def _newest_only(self) -> Iterator[None]:
        """Within the block torch overwrites the buffers with the newest ghost batch; momenta are put back."""
        before = [norm.momentum for norm in self._norms]
        for norm in self._norms:
            norm.momentum = 1.0
        try:
            yield
        finally:
            for norm, momentum in zip(self._norms, before, strict=True):
                norm.momentum = momentum

    def _take(self, flat: Tensor) -> None:
        """Rank 0 takes the whole, the others start from nothing."""
        for part, values in zip(self._part, flat.split([p.numel() for p in self._part]), strict=True):
            part.copy_(values.view_as(part) if _rank() == 0 else torch.zeros_like(part))
        self._whole = flat

    def _added_up(self) -> Tensor:
        if not self._part:
            return torch.zeros(0, dtype=torch.float64)
        flat = torch.cat([part.reshape(-1) for part in self._part])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
        return flat

    def _buffers(self) -> list[Tensor]:
        """Mean and variance of every norm as the model has them now: `model.to(device)` replaces them."""
        found = [buffer for norm in self._norms for buffer in (norm.running_mean, norm.running_var)]
        return [buffer for buffer in found if buffer is not None]

    def _counters(self) -> list[Tensor]:
        return [norm.num_batches_tracked for norm in self._norms if norm.num_batches_tracked is not None]


@torch.no_grad()
def exact_statistics(
    model: nn.Module, batches: Iterable[Tensor], share_of_all: float, variance: Variance = "pooled"
) -> None:
    """Give all batch-norms of `model` the statistics of its present weights over batches of all ranks.

    Every rank must call it with its own batches, possibly none; `share_of_all` is 1 / batches of all ranks together.
    All ranks end with the same numbers. Only batch-norms are in training mode while it lasts: what they see is what
    they will see in evaluation.
    """
    norms = _norms_of(model)
    modes = [(module, module.training) for module in model.modules()]
    counters = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
    counts = [counter.clone() for counter in counters]
    try:
        model.eval()
        for norm in norms:
            norm.train()
        statistics = GhostStatistics(model, 1.0, variance)
        for batch in batches:
            with statistics.ghost(share_of_all):
                model(batch)
        statistics.after_step()
        statistics.publish()
    finally:
        for module, training in modes:
            module.training = training
        for counter, count in zip(counters, counts, strict=True):
            counter.copy_(count)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _norms_of(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
