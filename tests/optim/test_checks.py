"""Settings and gradients that no optimizer takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megabatch.errors import ConfigError
from megabatch.optim.checks import check_not_negative, gradients_of


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf])
def test_a_number_that_cannot_work_is_named(value: float) -> None:
    with pytest.raises(ConfigError, match=rf"Thing rate {value:g} cannot be used; give a finite number"):
        check_not_negative("Thing", fine=0.0, rate=value)


def test_zero_and_tensors_pass() -> None:
    check_not_negative("Thing", rate=0.0, other=torch.tensor(-1.0))


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"Thing was given a sparse gradient .*sparse=False"):
        gradients_of(list(table.parameters()), "Thing")
