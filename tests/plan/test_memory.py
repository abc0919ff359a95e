"""The estimate of the planner against torch's own count with fake tensors, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megabatch.config import Config
from megabatch.model import resnet
from megabatch.plan.memory import RESERVED_BYTES, Memory, _stored, device_bytes_of, estimate, passes_of
from megabatch.recipes import load_config


def config_of(*settings: str) -> Config:
    sizes = ("data.source=generated", "data.path=", "train.ghost_batch_size=64", "train.global_batch_size=4096")
    return load_config("mikami2018", [*sizes, *settings])


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_stored_outputs_are_those_of_the_network(name: str) -> None:
    with torch.device("meta"):
        network, count = getattr(resnet, name)(), []
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_hook(lambda _m, _i, out: count.append(out.numel()))
        network.eval()(torch.zeros(1, 3, 224, 224))
    assert _stored(name) == (sum(p.numel() for p in network.parameters()), sum(count), count[0])


def test_settings_decide_what_is_kept_for_every_parameter() -> None:
    plain = estimate(config_of("comm.sums=float", "optimizer.name=sgd", "train.precision=fp32"))
    assert plain is not None
    assert (plain.exact_sums, plain.average, plain.casts, plain.optimizer) == (0, 0, 0, plain.weights)
    full = config_of("comm.grad_dtype=fp32", "comm.sums=exact", "optimizer.name=lamb", "model.ema_half_life_epochs=1")
    found, alone = estimate(full), estimate(full, passes=1)
    assert found is not None
    assert alone is not None
    assert (found.exact_sums, found.average, found.casts) == (found.weights, found.weights, found.weights // 2)
    assert (found.optimizer, alone.exact_sums) == (2 * found.weights, 0)
    assert found.total == sum((5 * found.weights, found.weights, found.weights // 2, found.passed))
    assert estimate(config_of("model.name=resnet8")) is None
    assert passes_of(full, 8) == 8
    assert passes_of(full, 7) == 10


def test_a_device_that_is_too_small_is_told_with_the_ghost_batch_that_fits() -> None:
    memory = Memory(1_000, 1_000, 1_000, 0, 0, 0, 64_000)
    device = RESERVED_BYTES + 3_000 + 32_000
    assert memory.verdict(64, device).startswith("DOES NOT FIT")
    assert not memory.fits(device)
    assert memory.fits(device + 32_000)
    assert memory.largest_ghost(64, device) == 32
    assert memory.of_ghost(64, 32).verdict(32, device).startswith("fits")
    assert memory.largest_ghost(64, 10) == 0
    assert memory.verdict(64).startswith("fits a device of 8 GB")


@pytest.mark.parametrize(("name", "size"), [("A100-SXM4-80GB", 80), ("V100 16 GB", 16), ("P100", 0), ("as found", 0)])
def test_the_name_of_an_accelerator_may_tell_its_memory(name: str, size: int) -> None:
    assert device_bytes_of(name) == size * 10**9
