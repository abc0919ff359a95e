"""LAMB: layer-wise adaptive rates for Adam (You et al. 2019, arXiv 1904.00962, algorithm 2).

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    u = m' / (sqrt(v') + eps) + weight_decay * w        m', v': m and v without the bias of their start at 0
    w = w - lr * |w| / |u| * u                          the ratio is 1 where |w| or |u| is zero

The paper leaves open whether |w| is clamped; it is not here. Groups marked `lars=False` (see `parameter_groups`:
batch-norm and biases) take the same step with ratio 1, which is AdamW's. The bias is what remains of the zeros after
all betas so far, so a beta1 that follows a schedule is corrected rightly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megabatch.optim.base import GroupedOptimizer, by_kind, check_not_negative, check_positive, check_share

__all__ = ["LAMB"]


class LAMB(GroupedOptimizer):
    """Adam with layer-wise rates, a drop-in for `torch.optim.AdamW`.

    Args:
        params: parameters, or groups; `megabatch.parameter_groups(model)` spares batch-norm and biases.
        lr: the learning rate before the ratio.
        betas: share of the past in the mean of gradients, and in the mean of their squares.
        weight_decay: times w, added to Adam's direction before its norm is taken.
        eps: added to the root of the mean of squares.
        bias_correction: take the zeros at the start out of both means; published code often leaves them in.

    Raises:
        ConfigError: a value that cannot work.
    """

    squares_gradients = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-6,
        *,
        bias_correction: bool = True,
    ) -> None:
        check_not_negative("LAMB", lr=lr, weight_decay=weight_decay)
        check_share("LAMB", beta1=betas[0], beta2=betas[1])
        check_positive("LAMB", eps=eps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "eps": eps,
            "bias_correction": bias_correction,
            "lars": True,
        }
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        for alike in by_kind(zip(params, grads, strict=True)):
            self._step_batched(group, *alike)

    def _step_batched(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Step parameters of one device and precision, all at once.

        On an accelerator every number lies on the device, so that a step can be taken back there.
        """
        on_host, (beta1, beta2) = _on_host(params[0]), group["betas"]
        means, squares = self._state_of(params, "mean"), self._state_of(params, "square_mean")
        torch._foreach_lerp_(means, grads, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1.0 - beta2)
        count = self._count_on_host if on_host else self._count_on_device
        shares, square_shares = count(params, "", beta1), count(params, "square_", beta2)
        roots = list(torch._foreach_sqrt(squares))
        if group["bias_correction"]:
            if isinstance(square_shares, Tensor):
                torch._foreach_mul_(roots, self._spread(square_shares.rsqrt(), params))
            else:
                torch._foreach_div_(roots, [math.sqrt(share) for share in square_shares])
        torch._foreach_add_(roots, group["eps"])
        moves = list(torch._foreach_div(means, roots))
        if group["bias_correction"]:
            if isinstance(shares, Tensor):
                torch._foreach_mul_(moves, self._spread(shares.reciprocal(), params))
            else:
                torch._foreach_div_(moves, shares)
        if group["weight_decay"]:
            torch._foreach_add_(moves, params, alpha=group["weight_decay"])
        if group["lars"]:
            ratios = _ratios(params, moves)
            torch._foreach_mul_(moves, ratios if on_host else self._spread(torch.stack(ratios), params))
        torch._foreach_add_(params, moves, alpha=-group["lr"])

    def _count_on_host(self, params: list[Tensor], prefix: str, beta: float) -> list[float]:
        """The share of gradients in a mean, one step later; what is kept is the rest, of the zeros it began with."""
        states, bias, share = [self.state[p] for p in params], f"{prefix}bias", f"{prefix}share"
        for state in states:
            before = 1.0 - state.pop(share).item() if share in state else state.get(bias, 1.0)
            state[bias] = before * beta
        return [1.0 - state[bias] for state in states]

    def _count_on_device(self, params: list[Tensor], prefix: str, beta: float) -> Tensor:
        """The same where a step begins with 0: the share itself is kept, fp32 holds it well."""
        states, bias, share = [self.state[p] for p in params], f"{prefix}bias", f"{prefix}share"
        for state, p in zip(states, params, strict=True):
            if share not in state:
                state[share] = torch.full((), 1.0 - state.pop(bias, 1.0), dtype=p.dtype, device=p.device)
        tensors = [state[share] for state in states]
        torch._foreach_mul_(tensors, beta)
        torch._foreach_add_(tensors, 1.0 - beta)
        return torch.stack(tensors)


def _on_host(parameter: Tensor) -> bool:
    return parameter.device.type == "cpu"


def _ratios(params: list[Tensor], moves: list[Tensor]) -> list[Tensor]:
    """|w| / |u| of every parameter, on the device; 1 where a norm is zero."""
    weight_norms, move_norms = (torch.stack(torch._foreach_norm(some)) for some in (params, moves))
    ratios = torch.where((weight_norms > 0) & (move_norms > 0), weight_norms / move_norms, 1.0)
    return list(ratios.unbind())
