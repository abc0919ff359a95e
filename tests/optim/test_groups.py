"""Which parameters are spared; settings and gradients that no optimizer takes."""

from __future__ import annotations

import torch
from torch import nn

from megabatch.model.registry import build_model
from megabatch.optim.groups import parameter_groups, split_groups

RESNET18_UNDECAYED = [
    "bn1.weight",
    "bn1.bias",
    "layer1.0.bn1.weight",
    "layer1.0.bn1.bias",
    "layer1.0.bn2.weight",
    "layer1.0.bn2.bias",
    "layer1.1.bn1.weight",
    "layer1.1.bn1.bias",
    "layer1.1.bn2.weight",
    "layer1.1.bn2.bias",
    "layer2.0.bn1.weight",
    "layer2.0.bn1.bias",
    "layer2.0.bn2.weight",
    "layer2.0.bn2.bias",
    "layer2.0.downsample.1.weight",
    "layer2.0.downsample.1.bias",
    "layer2.1.bn1.weight",
    "layer2.1.bn1.bias",
    "layer2.1.bn2.weight",
    "layer2.1.bn2.bias",
    "layer3.0.bn1.weight",
    "layer3.0.bn1.bias",
    "layer3.0.bn2.weight",
    "layer3.0.bn2.bias",
    "layer3.0.downsample.1.weight",
    "layer3.0.downsample.1.bias",
    "layer3.1.bn1.weight",
    "layer3.1.bn1.bias",
    "layer3.1.bn2.weight",
    "layer3.1.bn2.bias",
    "layer4.0.bn1.weight",
    "layer4.0.bn1.bias",
    "layer4.0.bn2.weight",
    "layer4.0.bn2.bias",
    "layer4.0.downsample.1.weight",
    "layer4.0.downsample.1.bias",
    "layer4.1.bn1.weight",
    "layer4.1.bn1.bias",
    "layer4.1.bn2.weight",
    "layer4.1.bn2.bias",
    "fc.bias",
]


def named(model: nn.Module, decay_norm_and_bias: bool = False) -> dict[float, list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[float, list[str]] = {}
    for group in parameter_groups(model, decay_norm_and_bias):
        found.setdefault(group["decay_factor"], []).extend(names[id(parameter)] for parameter in group["params"])
    return found


def test_the_undecayed_parameters_of_resnet18_by_name() -> None:
    with torch.device("meta"):
        model = build_model("resnet18", num_classes=10, in_channels=3)
    groups = named(model)
    assert list(groups) == [1.0, 0.0]
    assert sorted(groups[0.0]) == sorted(RESNET18_UNDECAYED)
    assert sorted(groups[0.0] + groups[1.0]) == sorted(name for name, _ in model.named_parameters())
    assert all(name.endswith("weight") for name in groups[1.0])


def test_everything_can_be_decayed() -> None:
    with torch.device("meta"):
        model = build_model("resnet18", num_classes=10, in_channels=3)
    assert list(named(model, decay_norm_and_bias=True)) == [1.0]
    assert sorted(named(model, decay_norm_and_bias=True)[1.0]) == sorted(name for name, _ in model.named_parameters())


class Misleading(nn.Module):
    """Names that say the opposite of what the modules are."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.Linear(2, 2)
        self.conv = nn.LayerNorm(2)
        self.group = nn.GroupNorm(1, 2)
        self.instance = nn.InstanceNorm1d(2, affine=True)
        self.rms = nn.RMSNorm(2)
        self.attention = nn.MultiheadAttention(2, 1)
        self.token = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.bn.weight


def test_the_type_of_the_module_decides_not_its_name() -> None:
    groups = named(Misleading())
    assert groups[1.0] == ["token", "bn.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    assert groups[0.0] == [
        *("bn.bias", "conv.weight", "conv.bias", "group.weight", "group.bias", "instance.weight", "instance.bias"),
        *("rms.weight", "attention.in_proj_bias", "attention.out_proj.bias"),
    ]


def test_an_optimizer_takes_the_groups_and_an_empty_one_is_left_out() -> None:
    for model, factors in (
        (nn.Linear(2, 2, bias=False), [1.0]),
        (nn.BatchNorm1d(2), [0.0]),
        (nn.Linear(2, 2), [1.0, 0.0]),
    ):
        optimizer = torch.optim.SGD(parameter_groups(model), lr=0.1)
        assert [group["decay_factor"] for group in optimizer.param_groups] == factors


def test_batch_norm_and_biases_stay_out_of_lars_whether_decayed_or_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    for decay_them in (False, True):
        adapted, spared = parameter_groups(model, decay_them)
        assert (adapted["lars"], spared["lars"]) == (True, False)
        assert [tuple(p.shape) for p in adapted["params"]] == [(4, 3, 3, 3)]
        assert len(spared["params"]) == 3


def test_a_weight_decay_given_here_reaches_an_optimizer_that_knows_no_marks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(parameter_groups(model, weight_decay=0.5), lr=0.1, weight_decay=7.0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_split_groups_slow_down_all_but_the_head() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    groups = split_groups(parameter_groups(model), model[2], 0.1)
    assert [(len(g["params"]), g["decay_factor"], g["lr_factor"]) for g in groups] == [
        (1, 1.0, 0.1),
        (1, 1.0, 1.0),
        (3, 0.0, 0.1),
        (1, 0.0, 1.0),
    ]
    assert groups[1]["params"][0] is model[2].weight
    assert groups[3]["params"][0] is model[2].bias
