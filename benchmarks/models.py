"""The models that benchmarks train."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Workload(NamedTuple):
    """A model and one rank's batch for it."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor


def workload(name: str, rows: int | None = None, ranks: int = 1) -> Workload:
    """`mlp` (communication-bound) or `resnet18` (compute-bound), with the batch of some ranks."""
    if name == "mlp":
        rows = ranks * (rows or 8)
        return Workload(mlp(), torch.randn(rows, 512), torch.randint(0, 1000, (rows,)))
    if name == "resnet18":
        rows = ranks * (rows or 16)
        return Workload(resnet18(), torch.randn(rows, 3, 64, 64), torch.randint(0, 1000, (rows,)))
    raise ValueError(f"unknown model {name!r}; known are mlp and resnet18.")


def mlp() -> nn.Module:
    """4,983,400 parameters."""
    return nn.Sequential(
        nn.Linear(512, 1600),
        nn.ReLU(),
        nn.Linear(1600, 1600),
        nn.ReLU(),
        nn.Linear(1600, 1000),
    )


class Transformer(nn.Module):
    """An encoder of three layers: scores of 1,000 tokens for each of (rows, length) tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of shape (rows, 1000, length)."""
        scores: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return scores.transpose(1, 2)


def resnet18(classes: int = 1000) -> nn.Module:
    """He et al. 2016; 11,689,512 parameters at 1000 classes."""
    widths = [64, 64, 128, 256, 512]
    stages = [
        nn.Sequential(Block(before, after, 1 if i == 0 else 2), Block(after, after, 1))
        for i, (before, after) in enumerate(pairwise(widths))
    ]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


def resnet50(classes: int = 1000) -> nn.Module:
    """He et al. 2016; 25,557,032 parameters at 1000 classes."""
    stages: list[nn.Module] = []
    before = 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for k in range(count):
            stages.append(Bottleneck(before, width, 2 if stage and not k else 1))
            before = 4 * width
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2048, classes),
    )


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def shortcut(before: int, after: int, stride: int) -> nn.Module:
    """Nothing, where the shapes agree."""
    if stride == 1 and before == after:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))
