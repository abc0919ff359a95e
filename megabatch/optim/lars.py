"""LARS: layer-wise adaptive rates (You, Gitman, Ginsburg 2017, arXiv 1708.03888) for momentum SGD.

A layer's lr is the scheduled lr times its trust ratio

    trust = coefficient * |w| / (|g| + weight_decay * |w| + eps)        1 where |w| or |g| is zero

and published code disagrees about where it enters. With d = g + weight_decay * w:

    rule            momentum                        step            found in
    paper           v = m * v + lr * trust * d      w -= v          the paper, MLPerf's reference, nnabla
    trust_inside    v = m * v + trust * d           w -= lr * v     timm, lightly, apex LARC (until removed)
    trust_outside   v = m * v + d                   w -= lr * trust * v     NUS, ColossalAI (there with hidden clamps)

They agree at a constant lr and trust, and differ in warm-up and decay: settings tuned for one rule are not settings
for another. Groups marked `lars=False` (see `parameter_groups`: batch-norm and biases) take the same step with trust 1.

Norms and ratios are computed in fp32 (fp64 for fp64 parameters). On an accelerator they are batched over all parameters
and stay on the device: nothing waits for them. Where it can, torch's fused SGD kernel makes the step there; it leaves
everything as it was where `found_inf`, an attribute that `GradScaler` and `skip` set, is 1 on the device. On a CPU
parameters are visited one by one, see `one_pass`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megabatch.errors import ConfigError
from megabatch.optim.base import GroupedOptimizer, by_kind, check_not_negative, check_positive, is_dense
from megabatch.optim.one_pass import momentum_in_one_pass, same_layout, trust_on_host

__all__ = ["LARS", "Rule", "trust_ratios"]

Rule = Literal["paper", "trust_inside", "trust_outside"]


class LARS(GroupedOptimizer):
    """Momentum SGD with layer-wise rates, a drop-in for `torch.optim.SGD`.

    Args:
        params: parameters, or groups; `megabatch.parameter_groups(model)` spares batch-norm and biases.
        lr: the learning rate before trust; a number, or a tensor when captured in a CUDA graph.
        momentum: share of the last step that is kept.
        weight_decay: added to the gradient as weight_decay * w, and part of the trust ratio.
        trust_coefficient: the paper's eta; MLPerf uses 0.001.
        eps: added to the denominator of the trust ratio.
        rule: where lr and the trust ratio enter, see the top of this file.
        clip: never let a layer's own lr exceed `lr`: trust becomes min(trust / lr, 1), the "C" of LARC.
        nesterov: step along the momentum that the next step will have.

    Raises:
        ConfigError: a value that cannot work.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        *,
        rule: Rule = "paper",
        clip: bool = False,
        nesterov: bool = False,
    ) -> None:
        if rule not in get_args(Rule):
            raise ConfigError(f"LARS rule '{rule}' is not known; choose one of {', '.join(get_args(Rule))}")
        check_not_negative("LARS", lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps)
        check_positive("LARS", trust_coefficient=trust_coefficient)
        if nesterov and momentum == 0:
            raise ConfigError("LARS nesterov needs momentum above 0; set one or the other")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "rule": rule,
            "clip": clip,
            "nesterov": nesterov,
            "lars": True,
        }
        super().__init__(params, defaults)

    @property
    def is_fused(self) -> bool:
        """Whether every step is made by the fused kernel, which takes `found_inf`."""
        return all(_can_fuse(group, group["params"]) for group in self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; momentum of one rule makes no sense under another and is refused."""
        for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=False):
            if theirs.get("rule", ours["rule"]) != ours["rule"]:
                raise ConfigError(
                    f"the saved LARS used rule '{theirs['rule']}', this one '{ours['rule']}': their momentum "
                    f"differs in meaning; build LARS with rule='{theirs['rule']}'"
                )
        super().load_state_dict(state_dict)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        batched: list[tuple[Tensor, Tensor, Tensor]] = []
        together: list[tuple[Tensor, Tensor, Tensor]] = []
        one_by_one = not isinstance(group["lr"], Tensor) and group["momentum"] > 0
        for tensors in zip(params, grads, self._state_of(params, "momentum_buffer"), strict=True):
            if not one_by_one or not same_layout(*tensors):
                batched.append(tensors)
            elif group["lars"]:
                _step_on_cpu(group, [tensors], _trust_on_cpu(group, *tensors[:2]))
            else:
                together.append(tensors)
        _step_on_cpu(group, together, trust=1.0)
        for alike in by_kind(batched):
            self._step_batched(group, *alike)

    def _step_batched(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], buffers: list[Tensor]
    ) -> None:
        """Step parameters of one device and precision, all at once."""
        trust = None
        if group["lars"]:
            trust = trust_ratios(params, grads, group["weight_decay"], group["trust_coefficient"], group["eps"])
            if group["clip"]:
                trust = torch.clamp(trust / group["lr"], max=1.0)
        if params[0].dtype in (torch.float16, torch.bfloat16):
            # A product such as 0.01 * trust has no room in half precision.
            wide_params, wide_grads, wide_buffers = ([t.float() for t in some] for some in (params, grads, buffers))
            _momentum_step(group, wide_params, wide_grads, wide_buffers, trust)
            torch._foreach_copy_(params, wide_params)
            torch._foreach_copy_(buffers, wide_buffers)
        elif _can_fuse(group, params):
            self._fused_step(group, params, grads, buffers, trust)
        else:
            _momentum_step(group, params, grads, buffers, trust)

    def _fused_step(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        buffers: list[Tensor],
        trust: Tensor | None,
    ) -> None:
        """As `_momentum_step`, in kernels over all parameters."""
        inner, outer = _inner_and_outer(group["rule"], group["lr"], 1.0 if trust is None else trust)
        moves = grads
        if group["weight_decay"]:
            moves = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        if isinstance(inner, Tensor) and inner.dim():
            moves = list(torch._foreach_mul(moves, self._spread(inner, params)))
        elif isinstance(inner, Tensor) or inner != 1.0:
            moves = list(torch._foreach_mul(moves, inner))
        torch._fused_sgd_(
            params,
            moves,
            buffers,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=outer,
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,
            found_inf=getattr(self, "found_inf", None),
        )


def trust_ratios(
    params: list[Tensor], grads: list[Tensor], weight_decay: float, trust_coefficient: float, eps: float
) -> Tensor:
    """The trust ratio of every parameter as one vector on their device; 1 where a norm is zero."""
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    weight_norms = torch.stack(torch._foreach_norm(params, 2, dtype))
    gradient_norms = torch.stack(torch._foreach_norm(grads, 2, dtype))
    ratios = trust_coefficient * weight_norms / (gradient_norms + weight_decay * weight_norms + eps)
    return torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)


def _trust_on_cpu(group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> float:
    settings = (group["weight_decay"], group["trust_coefficient"], group["eps"])
    trust = trust_on_host(parameter, gradient, *settings)
    if group["clip"]:
        return min(trust / group["lr"], 1.0) if group["lr"] else 1.0
    return trust


def _step_on_cpu(group: dict[str, Any], tensors: list[tuple[Tensor, Tensor, Tensor]], trust: float) -> None:
    """Step (parameter, gradient, momentum)s that lie on the CPU and have one trust ratio."""
    inner, outer = _inner_and_outer(group["rule"], group["lr"], trust)
    for params, grads, buffers in by_kind(tensors):
        momentum_in_one_pass(
            params,
            grads,
            buffers,
            inner=inner,
            outer=outer,
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
        )


def _inner_and_outer(rule: Rule, lr: Any, trust: Any) -> tuple[Any, Any]:
    """What multiplies the gradient on its way into the momentum, and the momentum on its way into the weights."""
    if rule == "paper":
        return lr * trust, 1.0
    return (trust, lr) if rule == "trust_inside" else (1.0, lr * trust)


def _can_fuse(group: dict[str, Any], params: list[Tensor]) -> bool:
    """Whether torch's fused SGD kernel, which takes one lr for all and needs momentum, makes this group's step."""
    plain = group["momentum"] > 0 and not (group["rule"] == "trust_outside" and group["lars"])
    return plain and all(p.is_cuda and p.dtype == torch.float32 and is_dense(p) for p in params)


def _momentum_step(
    group: dict[str, Any], params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], trust: Tensor | None
) -> None:
    """v = momentum * v + inner * (g + weight_decay * w), then w -= outer * v, with inner and outer as the rule says."""
    momentum, weight_decay = group["momentum"], group["weight_decay"]
    inner, outer = _inner_and_outer(group["rule"], group["lr"], 1.0 if trust is None else trust)
    torch._foreach_mul_(buffers, momentum)
    if group["nesterov"]:
        moves = list(torch._foreach_mul(grads, _each(inner, grads)))
        if weight_decay:
            _add_scaled(moves, params, inner * weight_decay)
        torch._foreach_add_(buffers, moves)
        torch._foreach_add_(moves, buffers, alpha=momentum)
        _add_scaled(params, moves, -outer)
        return
    _add_scaled(buffers, grads, inner)
    if weight_decay:
        _add_scaled(buffers, params, inner * weight_decay)
    _add_scaled(params, buffers, -outer)


def _each(scale: float | Tensor, tensors: list[Tensor]) -> Any:
    """A scale for a list of tensors: a number stays one, a vector is taken apart, a lone tensor is repeated."""
    if not isinstance(scale, Tensor):
        return scale
    return [scale] * len(tensors) if scale.dim() == 0 else list(scale.unbind())


def _add_scaled(targets: list[Tensor], tensors: list[Tensor], scale: float | Tensor) -> None:
    """targets += scale * tensors."""
    if isinstance(scale, Tensor):
        torch._foreach_addcmul_(targets, tensors, _each(scale, tensors))
    else:
        torch._foreach_add_(targets, tensors, alpha=scale)
