"""The bench of optimizer steps: the slow twin is LARS, everybody really steps, and the table shows every contestant."""

from __future__ import annotations

import copy

import pytest
import torch

from megabatch.bench.optimizer import LoopLARS, bench_steps, contestants, result_lines
from megabatch.model.registry import build_model
from megabatch.optim.groups import parameter_groups
from megabatch.optim.lars import LARS


def test_the_slow_twin_is_lars() -> None:
    torch.manual_seed(0)
    ours = build_model("resnet8", num_classes=10, in_channels=3, zero_gamma="none", width=8)
    slow = copy.deepcopy(ours)
    fast = LARS(parameter_groups(ours), 3.0, 0.9, 5e-5)
    loop = LoopLARS(parameter_groups(slow), 3.0, 0.9, 5e-5)
    for seed in range(3):
        for model, optimizer in ((ours, fast), (slow, loop)):
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
    for one, other in zip(ours.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_every_contestant_moves_the_weights() -> None:
    model = build_model("resnet8", num_classes=10, in_channels=3, zero_gamma="none", width=8)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e3)
    for name, step in contestants(model, lr=1.0).items():  # LARS moves them by a thousandth: not lost in rounding
        before = [p.detach().clone() for p in model.parameters()]
        step()
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), name


def test_the_table_has_a_row_for_each_and_leaves_the_threads_alone() -> None:
    threads = torch.get_num_threads()
    result = bench_steps("resnet8", rounds=2, threads=1)
    assert torch.get_num_threads() == threads
    assert all(len(seconds) == 2 for seconds in result["seconds"].values())
    lines = result_lines(result)
    assert len(lines) == 2 + len(result["seconds"]) + 3  # Shampoo with its roots spread over steps
    assert "n = 2 rounds" in lines[0]
    assert "1.00 [1.00-1.00]" in next(line for line in lines if line.startswith("torch SGD, foreach"))


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(Exception, match="resnet51"):
        bench_steps("resnet51", 1, 1)
