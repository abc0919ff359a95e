"""Shampoo with blocks and SGD grafting (Gupta 2018, arXiv 1802.09568; Anil 2020, arXiv 2002.09018).

    L_d = beta2 * L_d + (1 - beta2) * G_d G_d'          G_d: the gradient of a block, unfolded along dimension d
    P   = G multiplied along every d by (L_d + eps * largest eigenvalue)^(-1 / root)
    u   = |G| / |P| * P + weight_decay * w              norms of the whole parameter: as long as SGD's step (grafting)
    v   = momentum * v + u
    w   = w - lr * v                                    or lr * (u + momentum * v): nesterov

Roots are costly. They are computed every `every_steps` steps, from the statistics of the steps before, and shared out:
rank r computes every `world_size`-th matrix of the list sorted by size, and an all-gather brings the results to all. A
root depends on nothing but its matrix, and all ranks hold the bits of the one that computed it. So the step has the
same bits on any number of ranks.

The gathering is a call of its own, `gather_roots`, which changes nothing: when a rank is lost meanwhile, the others can
do the whole step again. `step` then needs no other rank. Without that call `step` gathers by itself.

Groups marked `lars=False` (see `parameter_groups`: batch-norm and biases) take momentum SGD's step, as do all in the
first `start_steps` steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.errors import ConfigError
from megabatch.optim.base import GroupedOptimizer, check_not_negative, check_positive, check_share
from megabatch.optim.blocks import add_statistics, from_blocks, inverse_root, new_statistics, precondition, to_blocks

__all__ = ["Shampoo"]

Roots = dict[Tensor, list[Tensor]]  # by parameter, one tensor of matrices for each dimension


class Shampoo(GroupedOptimizer):
    """Momentum SGD along preconditioned gradients; a drop-in for `torch.optim.SGD`, which takes the same lr.

    In a job of several ranks every rank must hold the same gradients and make the same calls.

    Args:
        params: parameters, or groups; `megabatch.parameter_groups(model)` spares batch-norm and biases.
        lr: the learning rate.
        momentum: beta1 of the papers.
        weight_decay: times w, added after the gradient has been preconditioned.
        nesterov: step along the momentum that the next step will have.
        beta2: share of the past in the statistics.
        eps: added to the eigenvalues, as a share of the largest.
        root: a preconditioner is its statistics to the power of -1 / root; theory has twice the number of dimensions.
        block_size: dimensions are cut into equal parts of at most this length.
        every_steps: how often roots are computed.
        start_steps: steps of plain momentum SGD, in which statistics gather.

    Raises:
        ConfigError: a value that cannot work.
    """

    squares_gradients = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        beta2: float = 0.85,
        eps: float = 1.5e-5,
        root: int = 4,
        block_size: int = 128,
        every_steps: int = 20,
        start_steps: int = 25,
    ) -> None:
        check_not_negative("Shampoo", lr=lr, momentum=momentum, weight_decay=weight_decay)
        check_share("Shampoo", beta2=beta2)
        check_positive("Shampoo", eps=eps)
        counts = {"root": root, "block_size": block_size, "every_steps": every_steps, "start_steps": start_steps}
        for name, count in counts.items():
            if count < 1:
                raise ConfigError(f"Shampoo {name} {count} cannot be used; give at least 1")
        values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {**values, "beta2": beta2, "eps": eps, **counts, "lars": True})
        self._gathered: Roots | None = None  # for the next step, once they are there

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._gathered = None
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def gather_roots(self) -> None:
        """Compute the roots that are due at the next step, together with all ranks; every rank must call it."""
        self._gathered = None  # of a step that was not made
        owners = [(p, group) for group in self.param_groups for p in group["params"] if self._is_due(p, group)]
        roots: Roots = {p: [torch.empty_like(some) for some in self.state[p]["statistics"]] for p, _ in owners}
        jobs = [
            (statistics, root, group)
            for p, group in owners
            for many, results in zip(self.state[p]["statistics"], roots[p], strict=True)
            for statistics, root in zip(many, results, strict=True)
        ]
        jobs.sort(key=lambda job: -job[0].numel())  # so that every rank gets its share of the large ones
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for statistics, root, group in jobs[rank::size]:
            root.copy_(inverse_root(statistics, group["root"], group["eps"]))
        if size > 1 and jobs:
            _gather([root for _, root, _ in jobs], rank, size)
        self._gathered = roots

    def _is_due(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        state = self.state.get(parameter)
        if not state or not state["statistics"] or state["steps"] < group["start_steps"]:
            return False
        return not state["roots"] or (state["steps"] - group["start_steps"]) % group["every_steps"] == 0

    def _begin_step(self) -> None:
        """Take the roots that were gathered for this step, or gather those that are due."""
        if self._gathered is None:
            self.gather_roots()
        gathered, self._gathered = self._gathered or {}, None
        for parameter, roots in gathered.items():
            self.state[parameter]["roots"] = roots

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        for parameter, gradient in zip(params, grads, strict=True):
            self._step_one(group, parameter, gradient)

    def _step_one(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(steps=0, momentum_buffer=torch.zeros_like(parameter), statistics=[], roots=[])
        move = gradient
        if group["lars"]:
            blocks = to_blocks(gradient, group["block_size"])
            if state["roots"]:
                direction = from_blocks(precondition(blocks, state["roots"]), parameter, group["block_size"])
                move = _grafted(direction, gradient)
            state["statistics"] = state["statistics"] or new_statistics(blocks)
            add_statistics(state["statistics"], blocks, group["beta2"])
        if group["weight_decay"]:
            move = move.add(parameter, alpha=group["weight_decay"])
        velocity: Tensor = state["momentum_buffer"]
        velocity.mul_(group["momentum"]).add_(move)
        ahead = move.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity
        parameter.add_(ahead, alpha=-group["lr"])
        state["steps"] += 1


def _grafted(direction: Tensor, gradient: Tensor) -> Tensor:
    """The direction, as long as the gradient; nothing where there is no direction."""
    own = torch.linalg.vector_norm(direction)
    return direction * torch.where(own > 0, torch.linalg.vector_norm(gradient) / own, 0.0)


def _gather(roots: list[Tensor], rank: int, size: int) -> None:
    """Bring to every rank what rank r has put into roots r, r + size, r + 2 size, ..."""
    lengths = [sum(root.numel() for root in roots[r::size]) for r in range(size)]
    widest = max((root.dtype for root in roots), key=lambda dtype: dtype.itemsize)
    rows = torch.zeros(size, max(lengths), dtype=widest, device=roots[0].device)
    own = rows[rank].clone()
    own[: lengths[rank]] = torch.cat([own[:0], *(root.flatten() for root in roots[rank::size])])
    dist.all_gather(list(rows.unbind()), own)
    for r, row in enumerate(rows):
        share = roots[r::size]
        parts = row[: lengths[r]].split([root.numel() for root in share])
        for root, values in zip(share, parts if share else [], strict=True):
            root.copy_(values.view_as(root))
