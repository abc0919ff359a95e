"""What the optimizers here have in common: the loop of a step, groups with a weight decay of their own, and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from megabatch.errors import ConfigError


class GroupedOptimizer(torch.optim.Optimizer):
    """An optimizer that knows the marks of `parameter_groups`; a subclass says how one group makes a step."""

    squares_gradients: ClassVar[bool] = False  # then parameters in half precision are refused

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._lengths: dict[tuple[int, ...], Tensor] = {}  # of parameters, on their device
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; `decay_factor` scales the weight decay of a group that names none of its own."""
        decay = self.defaults["weight_decay"] * param_group.get("decay_factor", 1.0)
        super().add_param_group({"weight_decay": decay, **param_group})
        for parameter in self.param_groups[-1]["params"]:
            if self.squares_gradients and parameter.dtype not in (torch.float32, torch.float64):
                raise ConfigError(
                    f"{type(self).__name__} was given {parameter.dtype} and needs fp32 or fp64 parameters: squares of "
                    "small gradients vanish; keep the weights in fp32 and compute under torch.autocast"
                )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step with the gradients at hand.

        Raises:
            ConfigError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin_step()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            if any(g.layout is not torch.strided for g in grads):
                raise ConfigError(
                    f"{type(self).__name__} was given a sparse gradient and needs dense ones; "
                    "build Embedding(sparse=False)"
                )
            if params:
                self._step_group(group, params, grads)
        return loss

    def _begin_step(self) -> None:
        """What comes before the first group."""

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Step the parameters of a group that have a gradient."""
        raise NotImplementedError

    def _state_of(self, params: list[Tensor], name: str) -> list[Tensor]:
        """A tensor of the state of every parameter; zeros, laid out as the parameter, where it has none yet."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [self.state[p][name] for p in params]

    def _spread(self, factors: Tensor, params: list[Tensor]) -> list[Tensor]:
        """Each parameter's factor in the parameter's own shape: kernels over lists need lists of like tensors."""
        lengths = tuple(p.numel() for p in params)
        if lengths not in self._lengths:
            self._lengths[lengths] = torch.tensor(lengths, device=factors.device)
        flat = torch.repeat_interleave(factors, self._lengths[lengths], output_size=sum(lengths))
        return [part.as_strided(p.shape, p.stride()) for part, p in zip(flat.split(lengths), params, strict=True)]


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in the usual order or with channels last."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def by_kind(tensors: Iterable[tuple[Tensor, ...]]) -> Iterator[list[list[Tensor]]]:
    """Tuples that belong together, such as (parameter, gradient), as lists for each device and precision."""

    def kind(together: tuple[Tensor, ...]) -> tuple[str, str]:
        return str(together[0].device), str(together[0].dtype)

    for _, alike in groupby(sorted(tensors, key=kind), key=kind):
        yield [list(some) for some in zip(*alike, strict=True)]


def check_not_negative(optimizer: str, **values: float | Tensor) -> None:
    """Refuse a setting below zero or not finite; a tensor is taken as it is, to read it would wait for the device."""
    for name, value in values.items():
        if not isinstance(value, Tensor) and not 0.0 <= value < float("inf"):
            raise ConfigError(f"{optimizer} {name} {value:g} cannot be used; give a finite number of at least 0")


def check_positive(optimizer: str, **values: float) -> None:
    """Refuse a setting that is zero, negative or not finite."""
    for name, value in values.items():
        if not 0.0 < value < float("inf"):
            raise ConfigError(f"{optimizer} {name} {value:g} cannot be used; give a finite number above 0")


def check_share(optimizer: str, **values: float) -> None:
    """Refuse a share of the past that is negative, or 1 and more: then nothing new would count."""
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{optimizer} {name} {value:g} cannot be used; give a number from 0 to below 1")
