"""Networks for small images: names, sizes, wiring, any input size, memory formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.model.resnet import ZeroGamma, residual_norms
from megabatch.model.small import SmallResNet, resnet8, resnet20, resnet44

Constructor = Callable[..., SmallResNet]
both = pytest.mark.parametrize("constructor", [resnet8, resnet20])


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_count_of_resnet20_is_the_papers_plus_the_projections() -> None:
    # 269,722 with parameter-free shortcuts; two projections of 1x1 weights, gamma and beta come on top.
    projections = (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)
    assert _count(resnet20()) == 269_722 + projections


@pytest.mark.parametrize(("in_channels", "width", "num_classes"), [(1, 16, 10), (3, 8, 7), (4, 24, 100)])
def test_parameter_count_of_resnet8(in_channels: int, width: int, num_classes: int) -> None:
    w = width
    stem = 9 * in_channels * w + 2 * w
    stage1 = 2 * (9 * w * w + 2 * w)
    stage2 = 9 * w * 2 * w + 9 * (2 * w) ** 2 + w * 2 * w + 3 * (2 * 2 * w)
    stage3 = 9 * 2 * w * 4 * w + 9 * (4 * w) ** 2 + 2 * w * 4 * w + 3 * (2 * 4 * w)
    classifier = 4 * w * num_classes + num_classes
    model = resnet8(num_classes=num_classes, in_channels=in_channels, width=width)
    assert _count(model) == stem + stage1 + stage2 + stage3 + classifier


@pytest.mark.parametrize(("constructor", "depth"), [(resnet8, 1), (resnet20, 3), (resnet44, 7)])
def test_names_are_those_of_the_large_networks(constructor: Constructor, depth: int) -> None:
    expected = ["conv1.weight", "bn1.weight", "bn1.bias"]
    for stage in (1, 2, 3):
        for block in range(depth):
            name = f"layer{stage}.{block}"
            for i in (1, 2):
                expected += [f"{name}.conv{i}.weight", f"{name}.bn{i}.weight", f"{name}.bn{i}.bias"]
            if block == 0 and stage > 1:
                expected += [f"{name}.downsample.{key}" for key in ("0.weight", "1.weight", "1.bias")]
    expected += ["fc.weight", "fc.bias"]
    assert [name for name, _ in constructor().named_parameters()] == expected


@pytest.mark.parametrize(
    ("constructor", "policy", "expected"),
    [
        (resnet8, "every_block", {"layer1.0.bn2", "layer2.0.bn2", "layer3.0.bn2"}),
        (
            resnet20,
            "every_block",
            {f"layer{stage}.{block}.bn2" for stage in (1, 2, 3) for block in (0, 1, 2)},
        ),
        (resnet20, "last_block_of_stage", {"layer1.2.bn2", "layer2.2.bn2", "layer3.2.bn2"}),
        (resnet20, "none", set()),
    ],
)
def test_zero_gamma(constructor: Constructor, policy: ZeroGamma, expected: set[str]) -> None:
    model = constructor(zero_gamma=policy)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    zero = {name for name, norm in norms.items() if torch.count_nonzero(norm.weight) == 0}
    assert zero == expected == set(residual_norms(model, policy))


def _recompute(state: Mapping[str, Tensor], x: Tensor, *, depth: int, stem_stride: int) -> Tensor:
    """The network in evaluation mode, as plain function calls on a state_dict."""

    def conv_norm(x: Tensor, conv: str, norm: str, stride: int) -> Tensor:
        weight = state[f"{conv}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        mean, var = state[f"{norm}.running_mean"], state[f"{norm}.running_var"]
        scale = state[f"{norm}.weight"] / (var + 1e-5).sqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + state[f"{norm}.bias"][:, None, None]

    x = conv_norm(x, "conv1", "bn1", stem_stride).clamp_min(0)
    for stage in (1, 2, 3):
        for block in range(depth):
            name = f"layer{stage}.{block}"
            stride = 2 if block == 0 and stage > 1 else 1
            y = conv_norm(x, f"{name}.conv1", f"{name}.bn1", stride).clamp_min(0)
            y = conv_norm(y, f"{name}.conv2", f"{name}.bn2", 1)
            if stride == 2:
                x = conv_norm(x, f"{name}.downsample.0", f"{name}.downsample.1", stride)
            x = (x + y).clamp_min(0)
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.parametrize(("constructor", "depth", "stem_stride"), [(resnet8, 1, 2), (resnet20, 3, 1), (resnet44, 7, 1)])
def test_forward_equals_functional_recomputation(constructor: Constructor, depth: int, stem_stride: int) -> None:
    generator = torch.Generator().manual_seed(4)
    model = constructor(num_classes=6, in_channels=2, width=5).double().eval()
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point() and value.dim() == 1:
                value.copy_(torch.rand(value.shape, generator=generator, dtype=value.dtype) + 0.5)
    images = torch.randn(3, 2, 29, 22, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        expected = _recompute(model.state_dict(), images, depth=depth, stem_stride=stem_stride)
        actual = model(images)
    assert expected.std() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@both
@pytest.mark.parametrize("size", [(8, 8), (8, 13), (28, 28), (32, 32), (31, 45)])
def test_any_size_from_8_px_trains(constructor: Constructor, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = constructor(num_classes=10, in_channels=1, zero_gamma="none")
    logits = model(torch.randn(4, 1, *size))
    assert logits.shape == (4, 10)
    torch.autograd.backward(F.cross_entropy(logits, torch.tensor([1, 2, 3, 4])))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@both
def test_channels_last_stays_channels_last_and_gives_the_same(constructor: Constructor) -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 28, 28, dtype=torch.float64)
    labels = torch.tensor([3, 1, 0, 2])
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(1)
        model = constructor(zero_gamma="none").double()
        model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
        kept: list[bool] = []
        model.layer3.register_forward_hook(
            lambda _module, _args, out, kept=kept, wanted=memory_format: kept.append(
                out.is_contiguous(memory_format=wanted)
            )
        )
        loss = F.cross_entropy(model(images.contiguous(memory_format=memory_format)), labels)
        torch.autograd.backward(loss)
        assert kept == [True]
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)
