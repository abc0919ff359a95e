"""The common part of the optimizers: decay of groups, the loop of a step, and settings that cannot work."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabatch.errors import ConfigError
from megabatch.optim.base import GroupedOptimizer, by_kind, check_not_negative, check_positive, check_share


class Thing(GroupedOptimizer):
    """Notes what it is asked to step."""

    def __init__(self, params: Any, weight_decay: float = 4.0) -> None:
        super().__init__(params, {"weight_decay": weight_decay})
        self.asked: list[tuple[list[Tensor], list[Tensor]]] = []

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        self.asked.append((params, grads))


class SquaringThing(Thing):
    squares_gradients = True


def parameter(value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def test_a_group_has_its_own_decay_or_its_share_of_the_optimizers() -> None:
    groups = [{"decay_factor": 0.5}, {"decay_factor": 0.5, "weight_decay": 3.0}, {}]
    optimizer = Thing([{"params": [parameter()], **group} for group in groups])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [2.0, 3.0, 4.0]


def test_only_parameters_with_a_gradient_are_stepped_and_the_loss_comes_back() -> None:
    with_gradient, without = parameter(2.0), parameter()
    optimizer = Thing([{"params": [with_gradient, without]}, {"params": [parameter()]}])

    def closure() -> float:
        loss = (with_gradient * 3).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 6.0
    ((params, grads),) = optimizer.asked
    assert params == [with_gradient]
    assert [g.tolist() for g in grads] == [[3.0]]


def test_half_precision_is_refused_by_those_who_square() -> None:
    with pytest.raises(ConfigError, match=r"SquaringThing was given torch\.bfloat16 and needs fp32 or fp64"):
        SquaringThing([parameter(dtype=torch.bfloat16)])
    assert len(Thing([parameter(dtype=torch.bfloat16)]).param_groups) == 1


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"Thing was given a sparse gradient .*sparse=False"):
        Thing(table.parameters()).step()


def test_tensors_of_a_kind_come_together_in_their_order() -> None:
    single, double, other = torch.zeros(1), torch.ones(2, dtype=torch.float64), torch.ones(3)
    found = [
        [[len(one) for one in some] for some in lists]
        for lists in by_kind([(single, single), (double, double), (other, single)])
    ]
    assert found == [[[1, 3], [1, 1]], [[2], [2]]]


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf])
def test_a_number_that_cannot_work_is_named(value: float) -> None:
    for check in (check_not_negative, check_positive, check_share):
        with pytest.raises(ConfigError, match=rf"^Thing rate {value:g} cannot be used; give a (finite )?number"):
            check("Thing", fine=0.5, rate=value)


def test_where_the_bounds_are() -> None:
    check_not_negative("Thing", rate=0.0, other=torch.tensor(-1.0))  # to read a tensor would wait for the device
    check_share("Thing", beta=0.0)
    with pytest.raises(ConfigError, match="Thing rate 0 cannot be used; give a finite number above 0"):
        check_positive("Thing", rate=0.0)
    with pytest.raises(ConfigError, match="Thing beta 1 cannot be used; give a number from 0 to below 1"):
        check_share("Thing", beta=1.0)
