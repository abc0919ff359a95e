"""One pass over memory: every block of a large tensor, flat views of channels-last ones, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from megabatch.optim import one_pass
from megabatch.optim.one_pass import momentum_in_one_pass, same_layout, trust_on_host


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("inner", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_it_is_the_formula(inner: float, nesterov: bool, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "_BLOCK", 64)  # 210 numbers: three whole blocks and a rest
    w, g, v = (random(5, 3, 2, 7, seed=seed) for seed in range(3))
    if channels_last:
        w, g, v = (t.to(memory_format=torch.channels_last) for t in (w, g, v))
    assert same_layout(w, g, v)
    move = inner * (g + 0.01 * w)
    velocity = 0.9 * v + move
    weights = w - 0.5 * (move + 0.9 * velocity if nesterov else velocity)
    gradient = g.clone()
    momentum_in_one_pass([w], [g], [v], inner=inner, outer=0.5, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    torch.testing.assert_close(w, weights, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(v, velocity, rtol=1e-12, atol=1e-14)
    assert torch.equal(g, gradient), "the gradient belongs to the user"


def test_what_flat_views_cannot_be_taken_of() -> None:
    contiguous = torch.zeros(4, 3, 2, 2)
    last = contiguous.to(memory_format=torch.channels_last)
    assert same_layout(contiguous, contiguous)
    assert same_layout(last, last)
    assert not same_layout(contiguous, last)
    assert not same_layout(contiguous.half(), contiguous.half())
    assert not same_layout(contiguous, contiguous.double())
    assert not same_layout(contiguous[::2], contiguous[::2])
    assert not same_layout(contiguous.to("meta"), contiguous.to("meta"))


def test_the_trust_ratio() -> None:
    weight, gradient = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    assert trust_on_host(weight, gradient, 0.2, 0.01, 1.0) == pytest.approx(0.01 * 5 / (10 + 0.2 * 5 + 1))
    assert trust_on_host(weight * 0, gradient, 0.2, 0.01, 0.0) == 1.0
    assert trust_on_host(weight, gradient * 0, 0.2, 0.01, 0.0) == 1.0


def test_small_ones_go_together_and_large_ones_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "_BLOCK", 10)
    sizes = (4, 5, 2, 23, 10, 1, 9, 1)
    lists = [[random(size, seed=10 * kind + size) for size in sizes] for kind in range(3)]
    blocks = list(one_pass._blocks(*lists))
    assert [[part.numel() for part in block[0]] for block in blocks] == [
        [4, 5],
        [10],
        [10],
        [3],
        [2],
        [10],
        [1, 9],
        [1],
    ]
    expected = []
    for w, g, v in zip(*lists, strict=True):
        velocity = 0.9 * v + 0.3 * (g + 0.01 * w)
        expected.append((w - 0.5 * velocity, velocity))
    momentum_in_one_pass(*lists, inner=0.3, outer=0.5, momentum=0.9, weight_decay=0.01, nesterov=False)
    for w, v, (weights, velocity) in zip(lists[0], lists[2], expected, strict=True):
        torch.testing.assert_close(w, weights, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(v, velocity, rtol=1e-12, atol=1e-14)
