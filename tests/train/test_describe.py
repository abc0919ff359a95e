"""The numbers printed before the first step, worked out by hand; layer lists, found without a trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from megabatch.comm.shape import parse_grid
from megabatch.data.sources import ImageArray
from megabatch.model.registry import build_model
from megabatch.plan.workload import model_layers
from megabatch.recipes import load_config
from megabatch.schedule.clock import Clock
from megabatch.train.describe import derived_lines, describe_data, describe_gradients, describe_kernels, list_layers
from megabatch.workers import world as world_module
from megabatch.workers.world import World, choose_device

NETWORK = nn.Linear(999, 1000)  # one million parameters
SETTINGS = (
    *("train.global_batch_size=1024", "train.ghost_batch_size=64", "train.epochs=5", "train.precision=fp32"),
    *("model.name=resnet8", "comm.algorithm=torus"),
)


def lines(world_size: int, grid: str, *overrides: str, samples_per_epoch: int = 60_000) -> list[str]:
    config = load_config("demo", [*SETTINGS, *overrides])
    clock = Clock(samples_per_epoch, round(config.train.epochs * samples_per_epoch))
    return derived_lines(config, clock, world_size, parse_grid(grid), NETWORK)


def test_sixteen_ghosts_on_four_workers() -> None:
    """1024 = 16 ghosts x 64 = 4 for each of 4 workers; 5 x 60,000 / 1024 = 292.97, so 293 steps."""
    assert lines(4, "2x2") == [
        "network        resnet8, 1,000,000 parameters, fp32",
        "gradients      4.0 MB in fp32",
        "workers        4 in a grid of 2x2, gradients by torus",
        "global batch   1,024 images",
        "from epoch 0   1,024 = 16 ghosts x 64; each worker accumulates 4; 58.59 steps an epoch",
        "learning rate  up to 0.8, sgd",
        "in all         293 steps, 300,000 images, 5 epochs of 60,000",
    ]


@pytest.mark.parametrize(("world_size", "each"), [(1, "16"), (3, "5 or 6"), (5, "3 or 4"), (16, "1"), (20, "0 or 1")])
def test_uneven_shards_are_said(world_size: int, each: str) -> None:
    assert f"each worker accumulates {each};" in lines(world_size, f"1x{world_size}")[4]


def test_stages_get_a_line_each_and_a_limit_is_said() -> None:
    """Stage one lasts 2 x 6,000 / 640 = 18.75, so 19 steps; 30,000 - 12,160 = 17,840 are 13.9 steps of 1280."""
    overrides = ('train.global_batch_size="0:640 2:1280"', "train.max_steps=20")
    found = lines(2, "1x2", *overrides, samples_per_epoch=6000)
    assert found[3:] == [
        "global batch   640 from epoch 0, 1,280 from epoch 2 images",
        "from epoch 0   640 = 10 ghosts x 64; each worker accumulates 5; 9.38 steps an epoch",
        "from epoch 2   1,280 = 20 ghosts x 64; each worker accumulates 10; 4.69 steps an epoch",
        "learning rate  up to 0.8, sgd",
        "in all         33 steps, 30,000 images, 5 epochs of 6,000, stopping after 20",
    ]
    assert "stopping" not in lines(2, "1x2", "train.max_steps=999")[-1]


def test_branches_and_growth_are_said() -> None:
    found = lines(2, "1x2", "collapse.at_epochs=[2.5, 5]", "collapse.epochs=1")
    assert found[-2] == "collapses      of 1 epochs each, from epoch 2.5, 5 of the trunk, not counted below"
    found = lines(2, "1x2", "batch_control.adaptive.max_global_batch_size=4096")
    assert found[-2] == "growing        by the noise scale, up to 4,096 images a step"
    assert found[-1].startswith("in all         at most 293 steps")


def test_the_list_of_resnet50_is_the_stored_one() -> None:
    stored, _ = model_layers("resnet50")
    network = build_model("resnet50", num_classes=1000, in_channels=3)
    found = list_layers(network, torch.zeros(2, 3, 224, 224))
    assert [(layer["name"], layer["parameters"]) for layer in found] == [(one.name, one.parameters) for one in stored]
    assert [layer["work"] for layer in found] == pytest.approx([one.work for one in stored])


class Noisy(nn.Module):
    """Draws a random number even when it is not trained."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + torch.rand(())


def test_it_leaves_no_trace() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), Noisy(), nn.Flatten(), nn.Linear(72, 3))
    network[1].eval()  # what somebody has frozen stays frozen
    before = {name: value.clone() for name, value in network.state_dict().items()}
    torch.manual_seed(1)
    randomness = torch.get_rng_state()
    found = describe_gradients(network, 1, 8)["layers"]
    assert [(layer["name"], layer["parameters"]) for layer in found] == [("0", 24), ("4", 219)]
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert [module.training for module in network] == [True, False, True, True, True]
    assert all(not module._forward_hooks for module in network.modules())


def test_a_network_that_does_not_take_such_images_has_no_list() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
    assert describe_gradients(network, 1, 8) == {"gradient_bytes": 48, "layers": None}
    assert all(module.training and not module._forward_hooks for module in network.modules())


def test_data_is_described_by_its_own_counts() -> None:
    train = ImageArray("a", np.zeros((7, 4, 4, 3), np.uint8), [0, 1, 2, 0, 1, 2, 0])
    val = ImageArray("b", np.zeros((3, 4, 4, 3), np.uint8), [0, 1, 2])
    assert describe_data(train, val) == {"train_images": 7, "val_images": 3, "classes": 3, "channels": 3}


def test_a_slice_of_a_device_is_one_device_and_recorded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    monkeypatch.setattr(world_module, "num_accelerators", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert describe_kernels()["CUDA_VISIBLE_DEVICES"] == name
    assert choose_device("auto", World(2, 3, 2, 3, "srun", "head", 1)) == (torch.device("cuda", 0), "nccl")
