"""The weights of a bucket as one operation: cast together on their way into a pass, gradients laid into DDP's buckets.

Alone, autocast casts every weight and every gradient by a kernel of its own, and DDP copies every gradient into its
bucket by another. Here all parameters of a bucket pass through one node of the graph. Forward it casts those that
autocast would cast. Backward it writes all their gradients into the memory of the bucket at once, where DDP finds them
and copies nothing. A bucket is sent when its last gradient is there, as before, so nothing is sent later.

Weights of modules that do more with them than torch's own, or that several kinds of module share, are left to autocast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megabatch.comm.exact import flat, lies_as

_CAST_BY_AUTOCAST = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_LEARN_PASSES = 3  # DDP arranges its buckets anew after the first


class Bucketed(nn.Module):
    """The network as DDP gets it; the plain network until `learn` has seen the buckets, and without gradients."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._holders: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
        is_cast: dict[Tensor, bool] = {}
        for module in network.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    self._holders.setdefault(p, []).append((module._parameters, name))
                    is_cast[p] = is_cast.get(p, True) and type(module) in _CAST_BY_AUTOCAST
        self._is_cast = is_cast
        self._buckets: list[_Bucket] = []
        self._passes = 0

    def learn(self) -> None:
        """After a synchronised backward pass: gradients are views of buckets now."""
        if self._passes == _LEARN_PASSES:
            return
        self._passes += 1
        by_storage: dict[int, list[Tensor]] = {}
        for p in self._holders:
            if p.grad is not None:
                by_storage.setdefault(p.grad.untyped_storage()._cdata, []).append(p)
        self._buckets = [_Bucket(some, [self._is_cast[p] for p in some]) for some in by_storage.values()]

    def forward(self, images: Tensor) -> Tensor:
        if not self._buckets or not torch.is_grad_enabled():
            return self.network(images)  # type: ignore[no-any-return]
        kind = images.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        try:
            for bucket in self._buckets:
                weights = _Through.apply(bucket, dtype, *bucket.parameters)  # type: ignore[no-untyped-call]
                for p, weight in zip(bucket.parameters, weights, strict=True):
                    for parameters, name in self._holders[p]:
                        parameters[name] = weight
            return self.network(images)  # type: ignore[no-any-return]
        finally:
            for p, holders in self._holders.items():
                for parameters, name in holders:
                    parameters[name] = p


class _Bucket:
    """Parameters whose gradients lie in one bucket, and where."""

    def __init__(self, parameters: list[Tensor], is_cast: list[bool]) -> None:
        self.parameters, self.is_cast = parameters, is_cast
        self.places = [p.grad.detach() for p in parameters if p.grad is not None]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: _Bucket, dtype: torch.dtype | None, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        weights = [p.detach() for p in parameters]
        if dtype is not None:
            chosen = [place for place, is_cast in enumerate(bucket.is_cast) if is_cast]
            cast = [torch.empty_like(weights[place], dtype=dtype) for place in chosen]
            if cast:
                torch._foreach_copy_([flat(one) for one in cast], [flat(weights[place]) for place in chosen])
            for place, one in zip(chosen, cast, strict=True):
                weights[place] = one
        return tuple(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        bucket: _Bucket = ctx.bucket
        results: list[Tensor | None] = []
        fresh: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        for p, place, gradient in zip(bucket.parameters, bucket.places, gradients, strict=True):
            if gradient is None:
                results.append(None)
                continue
            if not lies_as(gradient, p.stride()):
                gradient = torch.empty_like(p, dtype=gradient.dtype).copy_(gradient)
            if p.grad is None:
                target = place
                fresh.append((flat(target), flat(gradient)))
            else:  # accumulated: what is returned takes its place
                target, p.grad = p.grad, None
                added.append((flat(target), flat(gradient)))
            results.append(target.view_as(target))  # of its own, so that nobody need copy it
        for pairs in _by_dtype(fresh):
            torch._foreach_copy_(*_columns(pairs))
        for pairs in _by_dtype(added):
            targets, values = _columns(pairs)
            if values[0].dtype != targets[0].dtype:
                wide = [torch.empty_like(target) for target in targets]
                torch._foreach_copy_(wide, values)
                values = wide
            torch._foreach_add_(targets, values)
        return (None, None, *results)


def _by_dtype(pairs: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Kernels over lists need one precision in each list."""
    found: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        found.setdefault(pair[1].dtype, []).append(pair)
    return list(found.values())


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [target for target, _ in pairs], [value for _, value in pairs]
