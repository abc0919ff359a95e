"""Weights that pass through buckets: the same gradients bit for bit, in DDP's own memory, with fewer operations."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from megabatch.train.buckets import Bucketed
from tests.ranks import run_ranks


class Shifted(nn.Linear):
    """Does more with its weight than a plain layer: autocast casts the sum, not the weight."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight + 2.0**-10, self.bias)


def network() -> nn.Module:
    torch.manual_seed(1)
    tied = nn.Conv2d(8, 8, 3, padding=1, bias=False)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), tied, nn.BatchNorm2d(8), tied]
    layers += [nn.Conv2d(8, 4, 1), nn.Flatten(), Shifted(4 * 36, 16), nn.Linear(16, 5)]
    model = nn.Sequential(*layers)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def gradients(rank: int, bucketed: bool, bf16: bool, passes: int) -> list[list[bytes]]:
    """Of five steps; every step of so many passes, all but the last under no_sync."""
    torch.set_num_threads(1)
    module = Bucketed(network()) if bucketed else network()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.002, gradient_as_bucket_view=True)
    found = []
    for step in range(5):
        ddp.zero_grad(set_to_none=True)
        for number in range(passes):
            torch.manual_seed(100 * step + 10 * number + rank)
            images = torch.randn(6, 3, 8, 8).contiguous(memory_format=torch.channels_last)
            with nullcontext() if number == passes - 1 else ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    out = ddp(images)
                out.float().square().sum().backward()
        if isinstance(module, Bucketed):
            module.learn()
            assert all(isinstance(p, nn.Parameter) for p in module.network.parameters())  # they are back
        found.append([p.grad.contiguous().numpy().tobytes() for p in ddp.parameters() if p.grad is not None])
    return found


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_those_of_plain_ddp(passes: int, bf16: bool) -> None:
    plain, bucketed = (run_ranks(2, gradients, way, bf16, passes) for way in (False, True))
    assert len(plain[0][0]) == 12
    assert bucketed == plain


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(rank: int, bucketed: bool) -> dict[str, int]:
    module = Bucketed(network()) if bucketed else network()
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
    for _ in range(4):
        ddp.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(torch.ones(6, 3, 8, 8)).float().sum()
        with Counted() as mode:
            loss.backward()
        if isinstance(module, Bucketed):
            module.learn()
    return dict(mode.counts)


def test_no_gradient_is_copied_alone() -> None:
    plain, bucketed = (Counter(run_ranks(1, counted, way)[0]) for way in (False, True))
    assert plain["copy_"] + plain["_to_copy"] + plain["mul"] > 16
    assert bucketed["_foreach_copy_"] <= 4
    # What is left: the layer that autocast casts itself, and images.
    assert bucketed["copy_"] + bucketed["_to_copy"] <= 4, bucketed


def test_a_layer_that_is_not_used_gets_no_gradient() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, images: Tensor) -> Tensor:
            result: Tensor = self.used(images)
            return result

    heads = TwoHeads()
    module = Bucketed(heads)
    for _ in range(3):
        module.zero_grad()
        module(torch.ones(3, 4)).sum().backward()
        module.learn()
        assert heads.unused.weight.grad is None
        assert heads.used.weight.grad is not None
        assert torch.equal(heads.used.weight.grad, torch.full((2, 4), 3.0))
