"""Batch-norm statistics for evaluation that do not depend on how many ranks trained.

In training every batch-norm sees one ghost batch. Statistics for evaluation are defined by steps, not by ranks:
after a step, `running = (1 - momentum) * running + momentum * average`, where `average` is the mean of
the ghost batches' means and variances over ALL ghost batches of the step. With `momentum = 1` there is no moving
average: only the last step counts (Akiba 2017, section 2.3 of that paper's method).

Ghost batches' statistics are added as integers (fixed point, 2^-48), and the ranks' sums with one small all-reduce per
step. So every rank holds the same statistics after every step, and 1, 3 or 4096 ranks give the same bits.

The variance is the plain average of the ghosts' variances, as in the paper, or pooled: average variance plus the
variance of the ghosts' means, which is what all images together have. Pooled statistics keep averages of
variance + mean^2; with a moving average the pool is the past steps by their weights.

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

# Sums of 2^14 ghost batches fit into 63 bits.
_WHOLE = 2.0**8
_REST = 2.0**48
_LARGEST = 2.0**40


class GhostStatistics:
    """Collects the statistics of all batch-norms of `model` over ghost batches, steps and ranks.

        statistics = GhostStatistics(model, momentum=0.1)
        with statistics.ghost():                     # around each pass of training
            logits = ddp(images)
        ...
        optimizer.step()
        statistics.after_step()                      # on every rank
        ...
        statistics.publish()                         # before an evaluation

    The model may be moved to another device at any time. Its own `momentum` values stay as they are.
    """

    def __init__(self, model: nn.Module, momentum: float, variance: Variance = "plain") -> None:
        self.momentum = momentum
        self._pooled = variance == "pooled"
        self._norms = _norms_of(model)
        self._running = _flat(self._buffers())  # torch's initial values
        self._newest = torch.zeros(2, len(self._running) + 1, dtype=torch.int64)  # see `_add`
        self._is_reduced = False  # over the ranks
        self._steps: int | Tensor = 0

    @contextmanager
    def ghost(self, counts: bool = True) -> Iterator[None]:
        """Around a training pass: take in the statistics of its ghost batch, unless an idle rank only goes along."""
        if not counts:
            with self.untouched():
                yield
            return
        with self._newest_only():
            yield
        if self._norms:
            self._add(self._buffers())

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Around a forward and backward pass that must not count: the model's buffers stay as they were."""
        tensors = self._buffers()
        saved = [tensor.clone() for tensor in tensors]
        try:
            with self._newest_only():  # as in `ghost`: a compiled model then has one graph for both
                yield
        finally:
            if tensors:
                torch._foreach_copy_(tensors, saved)

    def reduce_step(self) -> None:
        """Add up what all ranks have collected in this step; every rank must call it."""
        self._follow()
        if self._norms and not self._is_reduced and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._newest)
        self._is_reduced = True

    def after_step(self, unless: Tensor | None = None) -> None:
        """Move the running average by the step that has just ended; every rank must call it.

        unless: a truth on the device, which nobody has to wait for: where it is true, the step is forgotten.
        """
        self.reduce_step()
        self._is_reduced = False
        self._steps = self._steps + (1 if unless is None else unless.logical_not())
        if not self._norms:
            return
        whole, rest = self._newest.double()
        sums = whole / _WHOLE + rest / _REST
        average = sums[:-1] / sums[-1].clamp_min(1.0)
        counts = sums[-1] > 0  # without a ghost batch all stays as it is
        if unless is not None:
            counts = counts & unless.logical_not()
            torch._foreach_zero_(self._buffers())  # see `forget_step`
        weight = self.momentum * counts.double()
        self._running = (1.0 - weight) * self._running.to(average.device) + weight * average
        self._newest.zero_()

    def forget_step(self) -> None:
        """Drop what a step that does not count has collected, from the model's buffers too.

        torch computes `(1 - 1) * old + 1 * new` for the next ghost batch, and 0 times infinity would never go away.
        """
        self._newest.zero_()
        self._is_reduced = False
        if self._norms:
            torch._foreach_zero_(self._buffers())

    @torch.no_grad()
    def publish(self) -> None:
        """Write the statistics into the model's buffers."""
        buffers = self._buffers()
        parts = self._running.clone().split([b.numel() for b in buffers])
        values = [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]
        if self._pooled:
            for mean, variance in zip(values[::2], values[1::2], strict=True):
                variance.sub_(mean.square()).clamp_min_(0.0)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        for counter in self._counters():
            counter.fill_(self._steps)

    def state_dict(self) -> dict[str, Tensor | int]:
        """The statistics of all ranks together, for a checkpoint, the same on every rank."""
        return {"running": self._running.clone(), "steps": int(self._steps)}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continue from `state`, on any number of ranks; every rank loads the same."""
        running, steps = state["running"], state["steps"]
        assert isinstance(running, Tensor)
        assert isinstance(steps, int)
        self._running, self._steps = running.to(self._running.device, copy=True), steps
        self._newest.zero_()

    @torch.no_grad()
    def _add(self, buffers: list[Tensor]) -> None:
        """Add a ghost batch's means and variances to the step's sums, and 1 to the count behind them.

        Two integers hold a number: multiples of 1 / _WHOLE, and what is left in multiples of 1 / _REST. Networks whose
        activations leave their range (1e12) have long diverged.
        """
        values = _flat(buffers)
        if self._pooled:
            parts = values.split([b.numel() for b in buffers])
            for mean, variance in zip(parts[::2], parts[1::2], strict=True):
                variance.addcmul_(mean, mean)
        values = torch.nan_to_num(values, nan=_LARGEST).clamp_(-_LARGEST, _LARGEST)
        whole = torch.round(values * _WHOLE)
        rest = torch.round((values - whole / _WHOLE) * _REST)
        self._follow()
        self._newest[:, :-1] += torch.stack([whole, rest]).to(torch.int64)
        self._newest[0, -1] += int(_WHOLE)

    def _follow(self) -> None:
        """Let the step's sums lie where the model does, on a rank that has collected nothing too: NCCL asks for it."""
        if self._norms:
            self._newest = self._newest.to(self._buffers()[0].device)

    @contextmanager
    def _newest_only(self) -> Iterator[None]:
        """Within the block torch overwrites the buffers with the newest ghost batch; momenta are put back.

        Nor does it count batches there, which is an operation of its own for every norm.
        """
        before = [(norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm in self._norms:
            norm.momentum, norm.num_batches_tracked = 1.0, None
        try:
            yield
        finally:
            for norm, (momentum, counter) in zip(self._norms, before, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, counter

    def _buffers(self) -> list[Tensor]:
        """Mean and variance of every norm as the model has them now: `model.to(device)` replaces them."""
        found = [buffer for norm in self._norms for buffer in (norm.running_mean, norm.running_var)]
        return [buffer for buffer in found if buffer is not None]

    def _counters(self) -> list[Tensor]:
        return [norm.num_batches_tracked for norm in self._norms if norm.num_batches_tracked is not None]


@torch.no_grad()
def exact_statistics(model: nn.Module, batches: Iterable[Tensor], variance: Variance = "pooled") -> None:
    """Give all batch-norms of `model` the statistics of its present weights over batches of all ranks.

    Every rank must call it with its own batches, possibly none. All ranks end with the same numbers. Only batch-norms
    are in training mode while it lasts: what they see is what they will see in evaluation.
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
            with statistics.ghost():
                model(batch)
        statistics.after_step()
        statistics.publish()
    finally:
        for module, training in modes:
            module.training = training
        for counter, count in zip(counters, counts, strict=True):
            counter.copy_(count)


def _flat(tensors: list[Tensor]) -> Tensor:
    # Cast at once: one operation instead of one for every tensor.
    return torch.cat([t.detach().reshape(-1) for t in tensors]).double() if tensors else torch.zeros(0).double()


def _norms_of(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
