"""ResNet-18/34/50/101/152 for large images, interchangeable with torchvision's by `state_dict`.

He 2015 (arXiv 1512.03385), table 1, in the "v1.5" variant: the bottleneck's stride is in its 3x3 convolution
instead of its first 1x1. Parameter and buffer names, shapes and their order are torchvision's, so weights go
both ways.

Initialisation: convolutions He normal by fan-out, batch-norm gamma 1 and beta 0, and the classifier as
torch's default (torchvision does all three likewise). Deviation: Goyal 2017 and Codreanu 2017 draw the
classifier from a normal distribution with deviation 0.01. On top of it, `ZeroGamma` says which residual
branches begin silent, so that the network starts as a shallower one:

    none                  no gamma is 0 (torchvision's default)
    every_block           the last norm of every residual branch (Goyal 2017, section 5.1)
    last_block_of_stage   only in the last block of each stage (Codreanu 2017; in ResNet-50 the four layers
                          bn2c, bn3d, bn4f and bn5c)
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.errors import ConfigError, nearest

ZeroGamma = Literal["none", "every_block", "last_block_of_stage"]


class ResidualBlock(nn.Module):
    """relu(branch(x) + shortcut(x)); the shortcut is a 1x1 projection where the shape changes, else x."""

    expansion: ClassVar[int]  # output channels = expansion * width
    last_norm: ClassVar[str]  # attribute name of the norm that ends the branch
    downsample: nn.Sequential | None

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()

    def branch(self, x: Tensor) -> Tensor:
        """The residual branch, up to and including its last norm."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.branch(x) + shortcut, inplace=True)


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions; the first one carries the stride."""

    expansion = 1
    last_norm = "bn2"

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__(in_channels, width, stride)
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(in_channels, width, stride)

    def branch(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out: Tensor = self.bn2(self.conv2(x))
        return out


class Bottleneck(ResidualBlock):
    """1x1 down, 3x3, 1x1 up to four times the width; the 3x3 carries the stride (v1.5)."""

    expansion = 4
    last_norm = "bn3"

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__(in_channels, width, stride)
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _projection(in_channels, out_channels, stride)

    def branch(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        out: Tensor = self.bn3(self.conv3(x))
        return out


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResNet(nn.Module):
    """7x7 stem with max-pool, four stages of residual blocks, global average pool, linear classifier."""

    def __init__(
        self,
        block: type[ResidualBlock],
        depths: tuple[int, int, int, int],
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        zero_gamma: ZeroGamma = "every_block",
    ) -> None:
        super().__init__()
        expansion = block.expansion
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = residual_stage(block, depths[0], in_channels=64, width=64, stride=1)
        self.layer2 = residual_stage(block, depths[1], in_channels=64 * expansion, width=128, stride=2)
        self.layer3 = residual_stage(block, depths[2], in_channels=128 * expansion, width=256, stride=2)
        self.layer4 = residual_stage(block, depths[3], in_channels=256 * expansion, width=512, stride=2)
        self.fc = nn.Linear(512 * expansion, num_classes)
        initialise(self, zero_gamma)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes) of images (N, in_channels, height, width)."""
        x = F.relu(self.bn1(self.conv1(images)), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def residual_stage(
    block: type[ResidualBlock], depth: int, *, in_channels: int, width: int, stride: int
) -> nn.Sequential:
    """`depth` blocks in a row; the first one changes resolution and channels, the others keep them."""
    first = block(in_channels, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width) for _ in range(depth - 1)))


def check_zero_gamma(policy: str) -> None:
    """Raise a ConfigError unless `policy` is one of `ZeroGamma`."""
    known = get_args(ZeroGamma)
    if policy not in known:
        raise ConfigError(f"zero_gamma is {policy!r}; it must be one of {', '.join(known)}{nearest(policy, known)}")


def residual_norms(model: nn.Module, policy: ZeroGamma = "every_block") -> dict[str, nn.BatchNorm2d]:
    """The norms ending a residual branch of `model` that `policy` starts with gamma 0, by qualified name.

    A stage is a direct child of `model` that is a sequence of `ResidualBlock`s.

    Raises:
        ConfigError: the policy is unknown.
    """
    check_zero_gamma(policy)
    norms: dict[str, nn.BatchNorm2d] = {}
    if policy == "none":
        return norms
    for stage_name, stage in model.named_children():
        if not isinstance(stage, nn.Sequential):
            continue
        blocks = [(name, block) for name, block in stage.named_children() if isinstance(block, ResidualBlock)]
        for block_name, block in blocks[-1:] if policy == "last_block_of_stage" else blocks:
            norm = getattr(block, block.last_norm)
            assert isinstance(norm, nn.BatchNorm2d)
            norms[f"{stage_name}.{block_name}.{block.last_norm}"] = norm
    return norms


def initialise(model: nn.Module, zero_gamma: ZeroGamma) -> None:
    """Draw the convolutions anew (He normal, fan-out), reset the norms, zero the gammas `zero_gamma` selects.

    Linear layers keep what torch gave them. The policy draws no random numbers; policies differ in gammas.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
    for norm in residual_norms(model, zero_gamma).values():
        nn.init.zeros_(norm.weight)


# By number of parameters: 11.7, 21.8, 25.6, 44.5 and 60.2 million.
resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(ResNet, Bottleneck, (3, 8, 36, 3))
