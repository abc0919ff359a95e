"""Bits that can be checked: digests of the weights, and audits that compute a random ghost batch again.

A processor that computes wrongly now and then leaves no other trace than a worse model. Every
`train.audit_every_steps` steps one ghost batch, drawn from the seed and the step, is computed again by every rank. What
its own rank has added to the exact sum must be what each of them gets. Otherwise the run stops before the optimizer
uses the gradient, and the ranks that differ from the others are named.

An audit costs the time of one ghost batch and one message with its images.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.comm.exact import flat
from megabatch.comm.messages import gather
from megabatch.data.loader import Ghost, Mixed
from megabatch.errors import TrainingError
from megabatch.machine import host_name
from megabatch.optim.base import is_dense
from megabatch.schedule.batch import Step, shard_range
from megabatch.train.components import Components
from megabatch.train.phases import audit_is_due

# Batch-norms hold what their rank's newest ghost batch left there; the statistics of the run are kept elsewhere.
_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")


def weights_digest(model: Mapping[str, Tensor], statistics: Mapping[str, Any]) -> str:
    """SHA-256 of a model's weights and of the batch-norm statistics of its run, from their `state_dict`s.

    The bytes are taken as they lie in memory, in the order of the model: they are not copied on a CPU.
    """
    digest = hashlib.sha256()
    weights = [tensor for name, tensor in model.items() if name.rpartition(".")[2] not in _OF_NORMS]
    for tensor in [*weights, *(value for value in statistics.values() if isinstance(value, Tensor))]:
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


class Audit:
    """The audit of one step.

    Tell it of every pass with `pass_begins`, and call `finish` on every rank when the step's sum fits.
    """

    def __init__(self, components: Components, step: Step) -> None:
        assert components.exact is not None
        self._components, self._exact, self._step = components, components.exact, step
        drawn = f"megabatch audit of step {step.index + 1} of seed {components.config.train.seed}"
        self._place = int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:8], "big") % step.num_ghosts
        shards = [shard_range(step.num_ghosts, step.world_size, rank) for rank in range(step.world_size)]
        self._owner = next(rank for rank, shard in enumerate(shards) if self._place in shard)
        self._parameters = [p for p in components.network.parameters() if p.requires_grad]
        self._digests: dict[Tensor, bytes] = {}
        self._ghost: Ghost | None = None

    @staticmethod
    def if_due(components: Components, step: Step) -> Audit | None:
        """The audit of this step, if it is one of those to be audited."""
        return Audit(components, step) if audit_is_due(components.config, step) else None

    def pass_begins(self, ghost: Ghost, place: int) -> None:
        """This rank is about to pass a ghost batch, the one at `place` in the step."""
        is_drawn = place == self._place and not ghost.idle
        if is_drawn or self._ghost is None:
            self._ghost = ghost
        self._exact.tap = self._take if is_drawn else None

    def finish(self, loss_of: Callable[[Ghost], Tensor]) -> None:
        """Compute the ghost batch again and compare; `loss_of` gives the loss as the step takes its gradient.

        Raises:
            TrainingError: on every rank, when the bits differ.
        """
        summed = self._join() if self._step.rank == self._owner else 0
        ghost = self._shared_ghost()
        with self._components.statistics.untouched():
            gradients = torch.autograd.grad(loss_of(ghost), self._parameters, allow_unused=True)
        self._digests.clear()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                self._take(parameter, self._exact.integers_of(parameter, _memory_of(gradient, parameter)))
        found = torch.zeros(self._step.world_size + 1, dtype=torch.int64)
        found[self._step.rank] = self._join()
        found[-1] = summed
        *again, summed = self._sum(found).tolist()
        if set(again) != {summed}:
            raise TrainingError(self._verdict(summed, again))

    def _take(self, parameter: Tensor, integers: Tensor) -> None:
        self._digests[parameter] = hashlib.sha256(_bytes_of(integers)).digest()

    def _join(self) -> int:
        """One number for the gradient of a ghost batch."""
        parts = b"".join(self._digests.get(parameter, b"-") for parameter in self._parameters)
        return int.from_bytes(hashlib.sha256(parts).digest()[:8], "big") >> 1

    def _shared_ghost(self) -> Ghost:
        """The drawn ghost batch, on every rank."""
        assert self._ghost is not None
        mixed = self._ghost.mixed
        parts = [self._ghost.images, self._ghost.labels, *([mixed.labels, mixed.shares] if mixed else [])]
        if self._step.rank != self._owner:  # a ghost batch of the same step has the same shape
            parts = [torch.zeros_like(part) for part in parts]
        images, labels, *of_mixed = [self._sum(part) for part in parts]
        number = self._step.start_samples // self._step.ghost_batch_size + self._place
        return Ghost(images, labels, number, mixed=Mixed(*of_mixed) if mixed else None)

    def _sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks; what one rank alone has reaches all of them."""
        values = values.to(self._components.device, copy=True)
        if self._step.world_size > 1:
            dist.all_reduce(values)
        return values

    def _verdict(self, summed: int, again: list[int]) -> str:
        """One line that names the ranks whose bits differ from those of the others."""
        named = [f"rank {rank} on {host}" for rank, host in enumerate(gather(host_name(), str))]
        value, _ = Counter([*again, summed]).most_common(1)[0]
        wrong = [rank for rank, one in enumerate(again) if one != value or (rank == self._owner and summed != value)]
        others = [one for rank, one in enumerate(named) if rank not in wrong]
        return (
            f"the audit of step {self._step.index + 1} failed: ghost batch {self._place} is held by "
            f"{named[self._owner]}, and {' and '.join(named[rank] for rank in wrong)} computed another gradient for it "
            f"than {others[0] if others else 'when it was computed again'}; the step was not applied; check memory and "
            "processor there, and that all hosts have the same processors and versions, then --resume"
        )


def _memory_of(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient's elements in the order of the parameter's memory."""
    return flat(torch.empty_like(parameter).copy_(gradient))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in the order of its memory."""
    elements = flat(tensor) if is_dense(tensor) else tensor.detach().reshape(-1)
    return elements.cpu().view(torch.uint8).numpy().data
