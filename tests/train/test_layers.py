"""Layer lists: equal to what a network consists of, and found without a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megabatch.model.registry import build_model
from megabatch.plan.workload import model_layers
from megabatch.train.layers import layers_or_none, list_layers


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
    found = layers_or_none(network, 1, 8)
    assert found is not None
    assert [(layer["name"], layer["parameters"]) for layer in found] == [("0", 24), ("4", 219)]
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert [module.training for module in network] == [True, False, True, True, True]
    assert all(not module._forward_hooks for module in network.modules())


def test_a_network_that_does_not_take_such_images_has_no_list() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
    assert layers_or_none(network, 1, 8) is None
    assert all(module.training and not module._forward_hooks for module in network.modules())
