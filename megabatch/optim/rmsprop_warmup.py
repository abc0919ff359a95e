"""RMSprop warm-up (Akiba, Suzuki, Fukuda 2017, arXiv 1711.04325, section 3.1): RMSprop that turns into momentum SGD.

    m = mu2 * m + (1 - mu2) * g^2
    v = mu1 * v + (share + rmsprop / (sqrt(m) + eps)) * g
    w = w - lr * v

`share`, the share of SGD, goes from almost 0 to 1 within the first epochs (`sgd_share`), and
rmsprop = (1 - share) * rmsprop_lr / lr: the RMSprop part moves at `rmsprop_lr` whatever `lr` is. No other warm-up
is needed. v is the paper's Delta with the sign of torch's momentum buffer; it holds no lr, so a step of `lr` needs no
momentum correction. Weight decay is added to the gradient first. Once share is 1 this is `torch.optim.SGD`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megabatch.errors import ConfigError
from megabatch.optim.base import GroupedOptimizer, check_not_negative, check_positive, check_share

__all__ = ["RMSpropWarmup", "sgd_share"]


class RMSpropWarmup(GroupedOptimizer):
    """RMSprop at first, momentum SGD later; call `set_epoch(epoch)` before each step.

    Args:
        params: parameters, or groups; `megabatch.parameter_groups(model)` spares batch-norm and biases.
        lr: that of the SGD part.
        momentum: mu1.
        weight_decay: added to the gradient as weight_decay * w, before it is squared.
        smoothing: mu2, the share of the past in the mean of squared gradients.
        eps: added to its root.
        rmsprop_lr: the lr of the RMSprop part, eta_RMSprop.
        center_epoch: where both parts have half, beta_center.
        period_epochs: how slowly one gives way to the other, beta_period.
        literal: the transition as printed, which overshoots to 1.5; see `sgd_share`.
        whole_epochs: let the share change only from epoch to epoch.

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
        smoothing: float = 0.99,
        eps: float = 1e-8,
        rmsprop_lr: float = 3e-4,
        center_epoch: float = 10.0,
        period_epochs: float = 5.0,
        literal: bool = False,
        whole_epochs: bool = False,
    ) -> None:
        name = "RMSpropWarmup"
        check_not_negative(name, lr=lr, momentum=momentum, weight_decay=weight_decay)
        check_not_negative(name, rmsprop_lr=rmsprop_lr, center_epoch=center_epoch)
        check_positive(name, eps=eps, period_epochs=period_epochs)
        check_share(name, smoothing=smoothing)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "smoothing": smoothing,
            "eps": eps,
            "rmsprop_lr": rmsprop_lr,
            "center_epoch": center_epoch,
            "period_epochs": period_epochs,
            "literal": literal,
            "whole_epochs": whole_epochs,
            "epoch": 0.0,
        }
        super().__init__(params, defaults)

    def set_epoch(self, epoch: float) -> None:
        """Say how far the training is, as a fractional epoch; the next steps use it."""
        check_not_negative("RMSpropWarmup", epoch=epoch)
        for group in self.param_groups:
            group["epoch"] = float(epoch)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """One group's step; lr 0 is a `ConfigError` while RMSprop has a share, which is divided by it."""
        share = share_of(group)
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        buffers = self._state_of(params, "momentum_buffer")
        torch._foreach_mul_(buffers, group["momentum"])
        if share != 0.0:
            torch._foreach_add_(buffers, grads, alpha=share)
        if share != 1.0:
            if group["lr"] == 0:
                raise ConfigError(
                    f"RMSpropWarmup has lr 0 at epoch {group['epoch']:g}, where RMSprop still has a share of "
                    f"{1 - share:.2g} that is divided by it; keep lr above 0 until the transition is over"
                )
            squares = self._state_of(params, "square_average")
            torch._foreach_mul_(squares, group["smoothing"])
            torch._foreach_addcmul_(squares, grads, grads, 1.0 - group["smoothing"])
            roots = torch._foreach_sqrt(squares)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(buffers, grads, roots, (1.0 - share) * group["rmsprop_lr"] / group["lr"])
        torch._foreach_add_(params, buffers, alpha=-group["lr"])


def share_of(group: dict[str, Any]) -> float:
    """The share of SGD in a group's next step."""
    epoch = math.floor(group["epoch"]) if group["whole_epochs"] else group["epoch"]
    return sgd_share(epoch, group["center_epoch"], group["period_epochs"], literal=group["literal"])


def sgd_share(epoch: float, center_epoch: float = 10.0, period_epochs: float = 5.0, *, literal: bool = False) -> float:
    """alpha_SGD of the paper at a fractional epoch.

        1/2 * exp(2 * (epoch - center) / period)     before the center
        1/2 + (epoch - center) / period              until period / 2 after it
        1                                            from there on

    The paper prints the middle line with slope 2 / period. That line reaches 1 half way, goes on to 1.5, falls back to
    1, and makes the share of RMSprop negative meanwhile; with slope 1 / period the curve is continuous and smooth at
    the center, as the paper's text describes it. `literal` gives the printed one.
    """
    passed = (epoch - center_epoch) / period_epochs
    if passed < 0:
        return 0.5 * math.exp(2.0 * passed)
    if passed < 0.5:
        return 0.5 + (2.0 if literal else 1.0) * passed
    return 1.0
