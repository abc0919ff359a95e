"""The gradient's noise scale, measured while gradients are on their way to the other workers.

    noise = NoiseScale(ddp.parameters())
    ddp.register_comm_hook(None, noise.hook())                              # around the backend's all-reduce
    ddp.register_comm_hook(None, noise.hook(*gradient_hook(grid, "torus")))   # or around any other

    noise.begin_step()
    for images, labels in my_pieces:                             # accumulation, no_sync for all but the last
        (loss(ddp(images), labels) / len(my_pieces)).backward()
        noise.after_backward(len(images), weight=1 / (len(my_pieces) * world_size))
    noise.end_step()                                             # before the gradients are clipped or stepped
    optimizer.step()
    noise.scale                                                    # smoothed, in images; None until it is known

On an accelerator `scale` is one step behind: nothing waits for the device.

Every backward pass is one piece of the step: its own gradient is the change of the accumulated one, and for the pass
that sends, what the bucket holds when the hook gets it. Nothing but the pieces' squared norms is needed, see
`megabatch.schedule.noise`. Because pieces, not workers, are compared, the result does not depend on how pieces lie
on workers, and one worker is enough as long as a step has two pieces.
"""

# No `from __future__ import annotations` here: DDP checks that a hook's annotations are classes, not strings.
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from megabatch.comm.exact import ExactSums, memory_of_gradient
from megabatch.comm.hook import Hook
from megabatch.comm.interpreter_exit import hold_default_group
from megabatch.comm.transfer import Reading, upload
from megabatch.schedule.noise import NoiseAverage, noise_sample

__all__ = ["NoiseScale"]


class NoiseScale:
    """Measures every `every_steps`-th step; `smoothing` is the weight of the past in the running averages."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        smoothing: float = 0.95,
        every_steps: int = 1,
        *,
        exact: ExactSums | None = None,
    ) -> None:
        self.average = NoiseAverage(smoothing)
        self.measuring = False
        self._parameters = [p for p in parameters if p.requires_grad]
        self._places = {p: place for place, p in enumerate(self._parameters)}
        self._every_steps = every_steps
        self._exact = exact is not None
        self._steps = 0
        self._wanted = False
        self._before: dict[Tensor, Tensor] = {}  # what was accumulated before the pass that is going on
        self._was_sent = False  # some bucket of the pass
        self._squares = self._zeros(len(self._parameters))  # norms of the pass that is going on, by parameter
        self._sums = self._zeros(0, 3)  # of the pieces, see `after_backward`
        self._totals: Tensor | None = None  # of all ranks
        self._reads_late = self._squares.device.type != "cpu"
        self._readings: deque[Reading] = deque()  # of steps that are not yet in the average
        self.num_measured = 0

    @property
    def scale(self) -> float | None:
        """B_simple in images."""
        return self.average.scale

    def hook(self, state: Any = None, inner: Hook = allreduce_hook) -> Hook:
        """The hook to register with DDP: it looks at a bucket and hands it to `inner`, with its state."""
        hold_default_group()

        def look_and_send(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if self.measuring:
                self._was_sent = True
                self._take_squares(bucket.parameters(), [gradient.view(-1) for gradient in bucket.gradients()])
            return inner(state, bucket)

        return look_and_send

    def begin_step(self, wanted: bool = True, num_pieces: int = 0) -> None:
        """Call when gradients are zero, before the first backward pass; unless `wanted` the step is left out.

        num_pieces: of all ranks, when `after_backward` says which piece it is; sums then have the same bits however
        pieces lie on ranks.
        """
        self._wanted = wanted
        self.measuring = wanted and self._steps % self._every_steps == 0
        self._before, self._was_sent, self._sums = {}, False, self._zeros(max(1, num_pieces), 3)
        self._totals = None

    def after_backward(self, num_samples: int, weight: float, piece: int = 0) -> None:
        """Call after a backward pass over `num_samples` images whose mean gradient counts `weight` in the step.

        The weights of all passes of all workers add up to 1. As always with DDP the pass must have been made with
        `weight * world_size` times the mean loss, because gradients are averaged over workers; with exact sums, with
        the mean loss, and before `add_ghost`. A pass of weight 0, of an idle rank, is left out.
        """
        if not self.measuring:
            return
        if not weight:
            self._was_sent, self._before = False, {}
            return
        if not self._was_sent:
            owned = [p for p in self._parameters if p.grad is not None]
            self._take_squares(owned, [memory_of_gradient(p) for p in owned])
            if not self._exact:
                self._remember()
        else:
            self._was_sent, self._before = False, {}
        # |g_j|^2 * w_j, since the pass contributed world_size * w_j * g_j; with exact sums g_j itself.
        factor = weight if self._exact else 1.0 / (weight * self._world_size**2)
        self._sums[piece, 0] += self._squares.sum() * factor
        self._sums[piece, 1] += weight / num_samples
        self._sums[piece, 2] += weight**2 / num_samples

    def reduce_step(self) -> None:
        """Add up what all ranks have measured; call it on every rank before gradients are unscaled, clipped or used."""
        if self.measuring and self._totals is None:
            norms = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None])
            # Hosts with other processors may differ in the last bit of the norm; what is decided by it must not.
            big = torch.stack(norms).double().square().sum() * float(self._is_main())
            totals = torch.cat([self._sums.reshape(-1), big.reshape(1)])
            if self._world_size > 1:
                dist.all_reduce(totals)
            self._totals = totals

    def end_step(self, loss_scale: float | Tensor = 1.0, *, unless: Tensor | None = None) -> float | None:
        """Take in the step, after `reduce_step`, and return the smoothed scale; on an accelerator of the step before.

        On every rank, before gradients are unscaled, clipped or used. A step that is not finite is left out.
        loss_scale: what losses were multiplied by; a tensor on the device is not waited for. unless: a truth there:
        where it is true, the step was left out and will be done again, see `forget_step`.
        """
        self.reduce_step()
        self._steps += self._wanted
        if self._totals is not None:
            if unless is not None:
                self._totals = torch.where(unless, math.nan, self._totals)
            scale = self._totals.new_full((), loss_scale) if isinstance(loss_scale, float | int) else loss_scale
            self._readings.append(Reading(torch.cat([self._totals, scale.double().reshape(1)])))
            self._totals = None
            self.num_measured += 1
            self.settle(self.num_measured - self._reads_late)
        return self.scale

    def forget_step(self) -> None:
        """The host has learned that a step was left out and will be done again; for all that came since as well."""
        self._steps -= 1

    def settle(self, num_measured: int | None = None) -> None:
        """Have the first `num_measured` measurements in the average, all by default; waits for those on their way."""
        wanted = self.num_measured if num_measured is None else num_measured
        while self.num_measured - len(self._readings) < wanted:
            *pieces, big_total, loss_scale = self._readings.popleft().list()
            small, sum_w_over_n, sum_w2_over_n = (math.fsum(pieces[column::3]) for column in range(3))
            squared = loss_scale**2
            sample = noise_sample(small / squared, big_total / squared, sum_w_over_n, sum_w2_over_n)
            if sample is not None:
                self.average.add(sample)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the same on every worker, plain numbers."""
        self.settle()
        return {**self.average.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, on any number of workers."""
        self._readings.clear()
        self.num_measured = 0
        self.average.load_state_dict(state)
        self._steps = state["steps"]

    def _zeros(self, *shape: int) -> Tensor:
        device = self._parameters[0].device if self._parameters else None
        return torch.zeros(shape, dtype=torch.float64, device=device)

    @property
    def _world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def _is_main(self) -> bool:
        return self._world_size == 1 or dist.get_rank() == 0

    def _remember(self) -> None:
        """Keep a copy of what is accumulated so far, in the memory of the copy before."""
        owned = [p for p in self._parameters if p.grad is not None]
        gradients = [memory_of_gradient(p) for p in owned]
        copies = [self._before.get(p) for p in owned]
        kept = [torch.empty_like(g) if c is None else c for g, c in zip(gradients, copies, strict=True)]
        torch._foreach_copy_(kept, gradients)
        self._before = dict(zip(owned, kept, strict=True))

    def _take_squares(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """|gradient - what was accumulated before|^2 by parameter; spoils the memory of what was accumulated."""
        changes = list(gradients)
        known = [place for place, p in enumerate(parameters) if p in self._before]
        if known:
            before = [self._before[parameters[place]] for place in known]
            torch._foreach_sub_(before, [changes[place] for place in known])
            for place, change in zip(known, before, strict=True):
                changes[place] = change
        places = [self._places[p] for p in parameters]
        squares = torch.stack(torch._foreach_norm(changes)).double().square()
        self._squares.index_copy_(0, upload(places, squares.device, torch.int64), squares)
