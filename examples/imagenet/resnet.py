"""Residual networks (He et al. 2016), with torchvision's names of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def build(arch: str, classes: int) -> nn.Module:
    """A model of `ARCHITECTURES`, for images of (n, 3, height, width)."""
    block, layers, width = ARCHITECTURES[arch]
    return ResNet(block, layers, width, classes)


class Basic(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + self.downsample(x)).relu()


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1; the stride is at the 3x3, as in torchvision."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = shortcut(before, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.bn3(self.conv3(y)) + self.downsample(x)).relu()


def shortcut(before: int, after: int, stride: int) -> nn.Module:
    if stride == 1 and before == after:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


class ResNet(nn.Module):
    """A stem of `width` channels (narrower than 64: one 3x3 convolution, for small images), stages
    of twice the channels and half the pixels each, and a linear layer."""

    def __init__(
        self, block: type[Basic | Bottleneck], layers: Sequence[int], width: int, classes: int
    ) -> None:
        super().__init__()
        small = width < 64
        self.conv1 = nn.Conv2d(
            3, width, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False
        )
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        before = width
        for stage, number in enumerate(layers):
            blocks = []
            for i in range(number):
                blocks.append(block(before, width << stage, 2 if stage and not i else 1))
                before = block.expansion * width << stage
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages = len(layers)
        self.fc = nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


ARCHITECTURES: dict[str, tuple[type[Basic | Bottleneck], tuple[int, ...], int]] = {
    "small": (Basic, (1, 1, 1), 16),
    "resnet18": (Basic, (2, 2, 2, 2), 64),
    "resnet34": (Basic, (3, 4, 6, 3), 64),
    "resnet50": (Bottleneck, (3, 4, 6, 3), 64),
    "resnet101": (Bottleneck, (3, 4, 23, 3), 64),
}
