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
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, overload

import torch
from torch import Tensor

from megabatch.errors import ConfigError
from megabatch.optim.groups import check_not_negative, decayed_group, gradients_of

__all__ = ["LAMB"]


class LAMB(torch.optim.Optimizer):
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
        check_not_negative("LAMB", lr=lr, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        if max(betas) >= 1 or not 0 < eps < math.inf:
            raise ConfigError(
                f"LAMB betas {betas[0]:g} and {betas[1]:g}, eps {eps:g} cannot be used; "
                "give betas below 1 and eps above 0"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "eps": eps,
            "bias_correction": bias_correction,
            "lars": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; `decay_factor` scales the weight decay of a group that names none of its own."""
        super().add_param_group(decayed_group(param_group, self.defaults["weight_decay"]))
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ConfigError(
                    f"LAMB was given {parameter.dtype} and needs fp32 or fp64 parameters: squares of small gradients "
                    "vanish; keep the weights in fp32 and compute under torch.autocast"
                )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step with the gradients at hand."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for _, same_kind in groupby(sorted(with_gradient, key=_kind), key=_kind):
                self._step_batched(group, list(same_kind))
        return loss

    def _step_batched(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Step parameters of one device and precision, all at once."""
        beta1, beta2 = group["betas"]
        grads = gradients_of(params, "LAMB")
        states = [self._state(p) for p in params]
        means: list[Tensor] = [state["mean"] for state in states]
        squares: list[Tensor] = [state["square_mean"] for state in states]
        torch._foreach_lerp_(means, grads, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1.0 - beta2)
        for state in states:
            state["bias"] *= beta1
            state["square_bias"] *= beta2
        roots = torch._foreach_sqrt(squares)
        if group["bias_correction"]:
            torch._foreach_div_(roots, [math.sqrt(1.0 - state["square_bias"]) for state in states])
        torch._foreach_add_(roots, group["eps"])
        moves = list(torch._foreach_div(means, roots))
        if group["bias_correction"]:
            torch._foreach_div_(moves, [1.0 - state["bias"] for state in states])
        if group["weight_decay"]:
            torch._foreach_add_(moves, params, alpha=group["weight_decay"])
        if group["lars"]:
            torch._foreach_mul_(moves, _ratios(params, moves))
        torch._foreach_add_(params, moves, alpha=-group["lr"])

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            for name in ("mean", "square_mean"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["bias"] = state["square_bias"] = 1.0  # the share of the zeros they begin with
        return state


def _ratios(params: list[Tensor], moves: list[Tensor]) -> list[Tensor]:
    """|w| / |u| of every parameter, on the device; 1 where a norm is zero."""
    weight_norms, move_norms = (torch.stack(torch._foreach_norm(some)) for some in (params, moves))
    ratios = torch.where((weight_norms > 0) & (move_norms > 0), weight_norms / move_norms, 1.0)
    return list(ratios.unbind())


def _kind(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.device), str(tensor.dtype)
