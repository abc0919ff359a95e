"""An optimizer's step that a device takes or leaves, by a truth that nobody on the host has to read.

Kernels of torch that take `found_inf` leave weights and state alone where it is 1. For the other optimizers here the
step is made with gradients of zero, so that all numbers stay finite, and what was there before is put back:
new * 1 + old * 0, or new * 0 + old * 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import LARS
from megabatch.optim.rmsprop_warmup import RMSpropWarmup


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unless` works for this optimizer; others keep numbers on the host that it could not put back.

    One of torch's that is `capturable` keeps nothing there; what its state begins with, its first step tells.
    """
    if _takes_found_inf(optimizer) or isinstance(optimizer, LAMB | LARS | RMSpropWarmup):
        return True
    return bool(optimizer.state) and all(group.get("capturable") for group in optimizer.param_groups)


@torch.no_grad()
def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Make a step with the gradients at hand, or, where `skip` is true on the device, none."""
    found_inf = skip.to(torch.float32)
    if _takes_found_inf(optimizer):
        _begin_with_zeros(optimizer)
        optimizer.found_inf, optimizer.grad_scale = found_inf, None  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        return
    _zero_gradients(optimizer, skip)
    known = _tensors(optimizer)
    old = [torch.empty_like(tensor) for tensor in known]
    torch._foreach_copy_(old, known)
    optimizer.step()
    torch._foreach_mul_(_tensors(optimizer), 1.0 - found_inf)  # what is new in this step began with zeros
    torch._foreach_mul_(old, found_inf)
    torch._foreach_add_(known, old)


@torch.no_grad()
def update_scale(scaler: torch.amp.GradScaler, unless: Tensor | None = None) -> None:
    """`scaler.update()`; where `unless` is true on the device, the scale and what it is decided by stay as they are."""
    if unless is None:
        scaler.update()
        return
    numbers = (scaler._scale, scaler._growth_tracker) if scaler.is_enabled() else ()
    kept = [tensor for tensor in numbers if tensor is not None]
    old = [tensor.clone() for tensor in kept]
    scaler.update()
    for tensor, value in zip(kept, old, strict=True):
        tensor.copy_(torch.where(unless, value, tensor))


def _takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, LARS):
        return optimizer.is_fused
    return isinstance(optimizer, torch.optim.SGD | torch.optim.AdamW) and all(
        group["fused"] for group in optimizer.param_groups
    )


def _begin_with_zeros(optimizer: torch.optim.Optimizer) -> None:
    """torch's SGD fills its momentum in the first step; a first step that is left out would leave what was there."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for p in group["params"] if group["momentum"] else []:
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


def _zero_gradients(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Gradients that are views of one bucket are zeroed in one go; zero times infinity would not do."""
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            storage = None if p.grad is None else p.grad.untyped_storage()
            if storage is None or storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            p.grad.as_strided((storage.nbytes() // p.grad.element_size(),), (1,), 0).masked_fill_(skip, 0.0)


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights that have a gradient, and what the optimizer remembers about them."""
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    states = [value for p in weights for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return weights + states
