"""LAMB against a float64 reference written from the paper, against another implementation, and alone."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from megabatch.errors import ConfigError
from megabatch.optim.groups import parameter_groups
from megabatch.optim.lamb import LAMB

SHAPES = [(4, 3, 3, 3), (10, 6), (7,), (1,)]


def weights_and_gradients(steps: int, dtype: torch.dtype) -> tuple[list[nn.Parameter], list[list[Tensor]]]:
    torch.manual_seed(3)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    return params, [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(steps)]


def reference(
    weights: list[Tensor], grads: list[list[Tensor]], lrs: list[float], beta1s: list[float], decay: float, eps: float
) -> list[Tensor]:
    """Algorithm 2 of the paper in float64, number by number; every parameter is adapted and decayed."""
    results = []
    for index, weight in enumerate(weights):
        w = weight.detach().double().flatten().tolist()
        m, v, left1, left2 = [0.0] * len(w), [0.0] * len(w), 1.0, 1.0
        for step, (lr, beta1) in enumerate(zip(lrs, beta1s, strict=True)):
            g = grads[step][index].double().flatten().tolist()
            left1, left2 = left1 * beta1, left2 * 0.99
            m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
            v = [0.99 * a + 0.01 * b * b for a, b in zip(v, g, strict=True)]
            u = [
                a / (1 - left1) / (math.sqrt(b / (1 - left2)) + eps) + decay * c
                for a, b, c in zip(m, v, w, strict=True)
            ]
            ratio = math.hypot(*w) / math.hypot(*u)
            w = [a - lr * ratio * b for a, b in zip(w, u, strict=True)]
        results.append(torch.tensor(w, dtype=torch.float64).view(weight.shape))
    return results


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_twelve_steps_are_those_of_the_paper(dtype: torch.dtype, tolerance: float) -> None:
    """lr and beta1 change all along."""
    params, grads = weights_and_gradients(12, dtype)
    lrs, beta1s = [0.01 * (1 + step) for step in range(12)], [0.5 + 0.03 * step for step in range(12)]
    expected = reference(list(params), grads, lrs, beta1s, decay=0.1, eps=1e-6)
    optimizer = LAMB(params, 1.0, (0.9, 0.99), weight_decay=0.1)
    for step, (lr, beta1) in enumerate(zip(lrs, beta1s, strict=True)):
        optimizer.param_groups[0].update(lr=lr, betas=(beta1, 0.99))
        for p, g in zip(params, grads[step], strict=True):
            p.grad = g.clone()
        optimizer.step()
    for p, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), wanted, rtol=tolerance, atol=tolerance)


def test_it_is_the_lamb_of_pytorch_optimizer() -> None:
    """That one leaves the bias in (so told), adds eps to |u| and clamps |w| at 10, which these weights do not reach."""
    ours, grads = weights_and_gradients(10, torch.float64)
    with torch.no_grad():
        for p in ours:
            p.mul_(0.5)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    one = LAMB(ours, 0.02, (0.9, 0.99), weight_decay=0.1, eps=1e-10, bias_correction=False)
    other = pytorch_optimizer.Lamb(
        theirs, 0.02, (0.9, 0.99), weight_decay=0.1, eps=1e-10, weight_decouple=False, adam_debias=True
    )
    for step in grads:
        for p, q, g in zip(ours, theirs, step, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        one.step()
        other.step()
        assert max(p.detach().norm().item() for p in ours) < 10
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-8)


def test_batch_norm_and_biases_take_adams_step() -> None:
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    lamb = LAMB(parameter_groups(model), 0.01, weight_decay=0.3, eps=1e-8)
    adam = torch.optim.AdamW(parameter_groups(twin, weight_decay=0.3), 0.01)
    for _ in range(4):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        lamb.step()
        adam.step()
    found, expected = model.state_dict(), twin.state_dict()
    for name in ("0.bias", "1.weight", "1.bias"):
        torch.testing.assert_close(found[name], expected[name])
    assert not torch.allclose(found["0.weight"], expected["0.weight"])


def test_weights_or_moves_of_zero_have_ratio_one() -> None:
    zero, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    zero.grad, still.grad = torch.ones(3), torch.zeros(3)
    LAMB([zero, still], 0.1, eps=1e-12).step()
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.1))
    torch.testing.assert_close(still.detach(), torch.ones(3))


def test_saved_state_goes_on_bit_for_bit() -> None:
    params, grads = weights_and_gradients(8, torch.float32)
    optimizer = LAMB(params, 0.05, weight_decay=0.1)
    others: list[nn.Parameter] = []
    again: LAMB | None = None
    for number, step in enumerate(grads):
        if number == 4:
            others = [nn.Parameter(p.detach().clone()) for p in params]
            again = LAMB(others, 1.0)
            again.load_state_dict(deepcopy(optimizer.state_dict()))
            again.param_groups[0]["lr"] = 0.05
        for p, g in zip([*params, *others], [*step, *step], strict=False):
            p.grad = g.clone()
        optimizer.step()
        if again is not None:
            again.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": -1.0}, "LAMB lr -1 cannot be used"),
        ({"betas": (1.0, 0.9)}, "LAMB beta1 1 cannot be used"),
        ({"betas": (0.9, -0.1)}, "LAMB beta2 -0.1"),
        ({"eps": 0.0}, "eps 0 cannot be used"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LAMB([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **values})


def test_half_precision_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs fp32 or fp64"):
        LAMB([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], 0.1)
