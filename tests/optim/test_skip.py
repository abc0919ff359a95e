"""A step that is left out leaves no trace, and one that is made is the optimizer's own, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megabatch.optim import lamb, lars
from megabatch.optim.groups import parameter_groups
from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import LARS
from megabatch.optim.rmsprop_warmup import RMSpropWarmup
from megabatch.optim.skip import can_skip, step_unless

Make = Callable[[list[dict[str, object]]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.1, 0.9, nesterov=True, weight_decay=0.01, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, 0.01, fused=True),
    "lars": lambda groups: LARS(groups, 0.1, weight_decay=0.01),
    "lars outside": lambda groups: LARS(groups, 0.1, weight_decay=0.01, rule="trust_outside"),
    "rmsprop warm-up": lambda groups: RMSpropWarmup(groups, 0.1, weight_decay=0.01),
    "lamb": lambda groups: LAMB(groups, 0.1, weight_decay=0.01),
}


def trained(make: Make, is_finite: list[bool], step: Callable[[torch.optim.Optimizer, Tensor], None]) -> list[Tensor]:
    """Weights and state after some steps; gradients that do not count hold infinity and NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))
    optimizer = make(parameter_groups(model))
    for number, finite in enumerate(is_finite):
        torch.manual_seed(number)
        flat = torch.randn(sum(p.numel() for p in model.parameters()))
        if not finite:
            flat[::3], flat[1::3] = math.nan, math.inf
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = part.view_as(p)  # views of one bucket
        step(optimizer, torch.tensor(not finite))
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [p.detach() for p in model.parameters()] + states


def on_host(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    if not skip:
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_finite", [[True] * 3, [True, False, True], [False, True, False, False, True]])
def test_the_device_decides_as_the_host_does(kind: str, is_finite: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb, "_on_host", lambda _: False)
    found, expected = (trained(KINDS[kind], is_finite, step) for step in (step_unless, on_host))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(tensor.isfinite().all() for tensor in found)


def test_who_can_leave_it_to_the_device() -> None:
    weight = [nn.Parameter(torch.ones(3))]
    assert all(can_skip(make([{"params": weight}])) for make in KINDS.values())
    assert not can_skip(torch.optim.NAdam(weight, 0.1))  # counts on the host
    assert not can_skip(torch.optim.SGD(weight, 0.1, foreach=True))
    capturable = torch.optim.Adam(weight, 0.1, capturable=True)
    assert not can_skip(capturable)  # nobody knows yet with which state it begins
    capturable.state[weight[0]] = {"step": torch.ones(())}
    assert can_skip(capturable)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_on_a_device_makes_the_step_of_the_host_and_goes_on_where_it_was_saved(
    bias_correction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(on_host: list[bool]) -> list[Tensor]:
        torch.manual_seed(2)
        layer = nn.Linear(6, 5)
        optimizer = LAMB(parameter_groups(layer), 0.1, weight_decay=0.01, bias_correction=bias_correction)
        for number, host in enumerate(on_host):
            monkeypatch.setattr(lamb, "_on_host", lambda _, host=host: host)
            again = LAMB(parameter_groups(layer), 0.1, weight_decay=0.01, bias_correction=bias_correction)
            if number:
                again.load_state_dict(optimizer.state_dict())
            optimizer = again
            for p in layer.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [p.detach() for p in layer.parameters()]

    expected = made([True] * 6)
    for places in ([False] * 6, [True, False, False, True, True, False]):
        for a, b in zip(made(places), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"rule": "trust_inside"}, {"nesterov": True}, {"clip": True}])
def test_the_fused_step_of_lars_is_its_step(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    make: Make = lambda groups: LARS(groups, 0.1, weight_decay=0.01, trust_coefficient=0.1, **options)  # type: ignore[arg-type]  # noqa: E731
    is_finite = [True, False, True, True]
    expected = trained(make, is_finite, on_host)
    monkeypatch.setattr(lars, "same_layout", lambda *_: False)  # as on an accelerator
    batched = trained(make, is_finite, on_host)
    monkeypatch.setattr(lars, "_can_fuse", lambda *_: True)
    fused = trained(make, is_finite, step_unless)
    for a, b, c in zip(expected, batched, fused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(c, b, rtol=1e-5, atol=1e-7)
