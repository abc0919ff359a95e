"""ResNets for large images: names, shapes, wiring, initialisation and the zero-gamma policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.errors import ConfigError
from megabatch.model.resnet import (
    ResNet,
    ZeroGamma,
    residual_norms,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
)

Constructor = Callable[..., ResNet]

# Published sizes of the five networks with 1000 classes and RGB input.
PARAMETERS = [
    (resnet18, 11_689_512),
    (resnet34, 21_797_672),
    (resnet50, 25_557_032),
    (resnet101, 44_549_160),
    (resnet152, 60_192_808),
]


@pytest.mark.parametrize(("constructor", "expected"), PARAMETERS)
def test_parameter_count(constructor: Constructor, expected: int) -> None:
    with torch.device("meta"):
        model = constructor()
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


# torchvision's naming rule, written again: name -> shape, in the order of its state_dict.


def _norm_entries(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    vectors = {f"{name}.{key}": (channels,) for key in ("weight", "bias", "running_mean", "running_var")}
    return {**vectors, f"{name}.num_batches_tracked": ()}


def _expected_entries(depths: tuple[int, ...], bottleneck: bool) -> dict[str, tuple[int, ...]]:
    entries: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7), **_norm_entries("bn1", 64)}
    channels = 64
    for stage, depth in enumerate(depths, start=1):
        width = 32 * 2**stage
        out = 4 * width if bottleneck else width
        for block in range(depth):
            kernels = [(channels, width, 1), (width, width, 3), (width, out, 1)]
            if not bottleneck:
                kernels = [(channels, width, 3), (width, width, 3)]
            for i, (c_in, c_out, size) in enumerate(kernels, start=1):
                entries[f"layer{stage}.{block}.conv{i}.weight"] = (c_out, c_in, size, size)
                entries.update(_norm_entries(f"layer{stage}.{block}.bn{i}", c_out))
            if block == 0 and (stage > 1 or bottleneck):
                entries[f"layer{stage}.{block}.downsample.0.weight"] = (out, channels, 1, 1)
                entries.update(_norm_entries(f"layer{stage}.{block}.downsample.1", out))
            channels = out
    return {**entries, "fc.weight": (1000, channels), "fc.bias": (1000,)}


@pytest.mark.parametrize(
    ("constructor", "depths", "bottleneck"),
    [
        (resnet18, (2, 2, 2, 2), False),
        (resnet34, (3, 4, 6, 3), False),
        (resnet50, (3, 4, 6, 3), True),
        (resnet101, (3, 4, 23, 3), True),
        (resnet152, (3, 8, 36, 3), True),
    ],
)
def test_names_shapes_and_order_are_torchvisions(
    constructor: Constructor, depths: tuple[int, ...], bottleneck: bool
) -> None:
    with torch.device("meta"):
        state = constructor().state_dict()
    assert [(name, tuple(value.shape)) for name, value in state.items()] == list(
        _expected_entries(depths, bottleneck).items()
    )


def test_some_names_literally() -> None:
    with torch.device("meta"):
        state = resnet50(num_classes=7, in_channels=1).state_dict()
    assert len(state) == 320  # 53 convolutions, 53 norms with five entries each, classifier with two
    assert tuple(state["conv1.weight"].shape) == (64, 1, 7, 7)
    assert tuple(state["layer1.0.downsample.0.weight"].shape) == (256, 64, 1, 1)
    assert tuple(state["layer3.5.conv3.weight"].shape) == (1024, 256, 1, 1)
    assert tuple(state["layer4.0.downsample.1.running_var"].shape) == (2048,)
    assert tuple(state["fc.bias"].shape) == (7,)
    assert "layer4.1.downsample.0.weight" not in state
    assert state["bn1.num_batches_tracked"].dtype == torch.int64


def _first_block_shapes(model: nn.Module, images: Tensor) -> dict[str, tuple[int, int]]:
    """(height, width) leaving each module, by name."""
    sizes: dict[str, tuple[int, int]] = {}

    def remember(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, args: object, out: Tensor) -> None:
            sizes[name] = (out.shape[-2], out.shape[-1])

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(remember(name))
    model(images)
    return sizes


def test_stride_is_in_the_3x3_of_the_bottleneck() -> None:
    with torch.device("meta"):
        sizes = _first_block_shapes(resnet50(), torch.empty(1, 3, 224, 160))
    assert sizes["conv1"] == (112, 80)
    assert sizes["layer1"] == (56, 40)
    for stage, (before, after) in {2: (56, 28), 3: (28, 14), 4: (14, 7)}.items():
        block = f"layer{stage}.0"
        assert sizes[f"{block}.conv1"][0] == before  # v1 would already halve here
        assert sizes[f"{block}.conv2"][0] == after
        assert sizes[f"{block}.downsample.0"][0] == after
        assert sizes[f"layer{stage}"][0] == after


def test_stride_is_in_the_first_convolution_of_the_basic_block() -> None:
    with torch.device("meta"):
        sizes = _first_block_shapes(resnet18(), torch.empty(1, 3, 64, 64))
    assert sizes["layer1.0.conv1"] == (16, 16)
    assert sizes["layer2.0.conv1"] == sizes["layer2.0.conv2"] == (8, 8)
    assert sizes["layer4"] == (2, 2)


def _recompute(state: Mapping[str, Tensor], images: Tensor, *, training: bool) -> Tensor:
    """ResNet-50 (v1.5) as plain function calls on a state_dict."""

    def conv(x: Tensor, name: str, stride: int, padding: int) -> Tensor:
        return F.conv2d(x, state[f"{name}.weight"], stride=stride, padding=padding)

    def norm(x: Tensor, name: str) -> Tensor:
        if training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        else:
            mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        scale = state[f"{name}.weight"] / (var + 1e-5).sqrt()
        shift = state[f"{name}.bias"] - mean * scale
        return x * scale[:, None, None] + shift[:, None, None]

    x = norm(conv(images, "conv1", 2, 3), "bn1").clamp_min(0)
    x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
    for stage, depth in ((1, 3), (2, 4), (3, 6), (4, 3)):
        for block in range(depth):
            name = f"layer{stage}.{block}"
            stride = 2 if block == 0 and stage > 1 else 1
            y = norm(conv(x, f"{name}.conv1", 1, 0), f"{name}.bn1").clamp_min(0)
            y = norm(conv(y, f"{name}.conv2", stride, 1), f"{name}.bn2").clamp_min(0)
            y = norm(conv(y, f"{name}.conv3", 1, 0), f"{name}.bn3")
            if block == 0:
                x = norm(conv(x, f"{name}.downsample.0", stride, 0), f"{name}.downsample.1")
            x = (x + y).clamp_min(0)
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize("training", [True, False])
def test_forward_equals_functional_recomputation(training: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    model = resnet50(num_classes=11).double().train(training)
    with torch.no_grad():
        # Distinct values everywhere: a gamma of 0 or statistics of 0 and 1 would hide a wrongly wired branch.
        for name, value in model.state_dict().items():
            if value.is_floating_point() and value.dim() == 1:
                value.copy_(torch.rand(value.shape, generator=generator, dtype=value.dtype) + 0.5)
                if name.endswith(("bias", "running_mean")):
                    value.sub_(1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(3, 3, 65, 50, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        expected = _recompute(state, images, training=training)
        actual = model(images)
    assert expected.std() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def _zero_gammas(model: nn.Module) -> set[str]:
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    zero = {name for name, norm in norms.items() if torch.count_nonzero(norm.weight) == 0}
    for name, norm in norms.items():
        assert torch.count_nonzero(norm.bias) == 0
        assert name in zero or torch.equal(norm.weight, torch.ones_like(norm.weight))
    return zero


RESNET18_EVERY_BLOCK = {f"layer{stage}.{block}.bn2" for stage in (1, 2, 3, 4) for block in (0, 1)}
RESNET50_EVERY_BLOCK = {
    *("layer1.0.bn3", "layer1.1.bn3", "layer1.2.bn3"),
    *("layer2.0.bn3", "layer2.1.bn3", "layer2.2.bn3", "layer2.3.bn3"),
    *("layer3.0.bn3", "layer3.1.bn3", "layer3.2.bn3", "layer3.3.bn3", "layer3.4.bn3", "layer3.5.bn3"),
    *("layer4.0.bn3", "layer4.1.bn3", "layer4.2.bn3"),
}
# bn2c, bn3d, bn4f and bn5c, branch2c, in the paper's names (stage 1 is the stem; a is block 0).
RESNET50_CODREANU = {"layer1.2.bn3", "layer2.3.bn3", "layer3.5.bn3", "layer4.2.bn3"}


@pytest.mark.parametrize(
    ("constructor", "policy", "expected"),
    [
        (resnet18, "none", set()),
        (resnet18, "every_block", RESNET18_EVERY_BLOCK),
        (resnet18, "last_block_of_stage", {"layer1.1.bn2", "layer2.1.bn2", "layer3.1.bn2", "layer4.1.bn2"}),
        (resnet50, "none", set()),
        (resnet50, "every_block", RESNET50_EVERY_BLOCK),
        (resnet50, "last_block_of_stage", RESNET50_CODREANU),
    ],
)
def test_zero_gamma_policy(constructor: Constructor, policy: ZeroGamma, expected: set[str]) -> None:
    model = constructor(num_classes=3, zero_gamma=policy)
    assert _zero_gammas(model) == expected
    norms = residual_norms(model, policy)
    assert set(norms) == expected
    assert all(norm is model.get_submodule(name) for name, norm in norms.items())


def test_default_policy_is_every_block() -> None:
    assert _zero_gammas(resnet50(num_classes=3)) == RESNET50_EVERY_BLOCK


def test_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"zero_gamma is 'every_blok'.*did you mean 'every_block'"):
        resnet18(num_classes=3, zero_gamma=cast(ZeroGamma, "every_blok"))


def test_initial_convolutions_are_he_normal_by_fan_out() -> None:
    torch.manual_seed(5)
    model = resnet18(num_classes=10)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 8000:
            out_channels, _, height, width = module.weight.shape
            expected = math.sqrt(2 / (out_channels * height * width))
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05), name
            kurtosis = ((module.weight / module.weight.std()) ** 4).mean().item()
            assert kurtosis == pytest.approx(3, abs=0.4), name  # a uniform distribution has 1.8
    bound = 1 / math.sqrt(512)  # torch's default for a linear layer with 512 inputs
    assert model.fc.weight.abs().max().item() == pytest.approx(bound, rel=0.01)


def test_policies_draw_the_same_random_numbers() -> None:
    states = []
    policies: tuple[ZeroGamma, ...] = ("none", "every_block")
    for policy in policies:
        torch.manual_seed(11)
        states.append(resnet18(num_classes=4, zero_gamma=policy).state_dict())
    different = {name for name in states[0] if not torch.equal(states[0][name], states[1][name])}
    assert different == {f"{name}.weight" for name in RESNET18_EVERY_BLOCK}


@pytest.mark.parametrize("constructor", [resnet18, resnet50])
@pytest.mark.parametrize(("in_channels", "height", "width"), [(3, 33, 47), (1, 64, 31), (4, 32, 32)])
def test_odd_sizes_give_logits_and_gradients(
    constructor: Constructor, in_channels: int, height: int, width: int
) -> None:
    torch.manual_seed(0)
    model = constructor(num_classes=5, in_channels=in_channels, zero_gamma="none")
    logits = model(torch.randn(2, in_channels, height, width))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_channels_last_gives_the_same_logits() -> None:
    torch.manual_seed(0)
    model = resnet18(num_classes=5, zero_gamma="none").double().eval()
    images = torch.randn(2, 3, 40, 33, dtype=torch.float64)
    with torch.no_grad():
        expected = model(images)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        actual = model(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
