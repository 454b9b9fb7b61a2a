"""Modules that every rank computes whole on an accelerator whose kernels round differently each
time: parameters and buffers stay the same on all ranks, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import instep
import pool
from instep.distributed.communication.transport import get_transport
from sharded_training import sharding

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _on_accelerators() -> Iterator[None]:
    with pool.talking_over("sim"):
        yield


def rounded(value: Tensor) -> Tensor:
    """The value as this rank's kernel rounds it."""
    return value * (1 + instep.rank * 1e-12)


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return rounded(grad)


class Coupled(nn.Module):
    """Its rows depend on each other, so every rank computes it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
        self.codes = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(rounded(x.detach().mean(0)), 0.1)
        out = F.linear(x.cumsum(0), self.weight) / 10
        if not torch.compiler.is_compiling():
            out = Rounding.apply(out)
        return out


class Following(Coupled):
    """It moves a parameter of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.codes.data.lerp_(rounded(x.detach().mean(0)), 0.1)
        return out + self.codes.detach()


def trained(model: nn.Module, step: Callable[[nn.Module, Tensor], None]) -> None:
    """All ranks have the same parameters and buffers after some steps."""
    generator = torch.Generator().manual_seed(3)
    model.double().to(pool.device())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sharding():
        for _ in range(6):
            optimizer.zero_grad()
            rows = torch.randn(8, 6, generator=generator, dtype=torch.float64, device="cpu")
            step(model, rows.to(pool.device()))
            optimizer.step()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    first, *others = get_transport().all_gather_object(state)
    for other in others:
        differing = [name for name in first if not torch.equal(first[name], other[name])]
        assert not differing, differing


def divided(kind: type[Coupled]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), kind(), nn.Linear(6, 2))


def by_parts(model: nn.Module, x: Tensor) -> None:
    for part in model.children():
        x = part(x)
    x.square().mean().backward()


def at_once(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def recomputed(model: nn.Module, x: Tensor) -> None:
    first, middle, coupled, last = model.children()
    hidden = checkpoint(coupled, middle(first(x)), use_reentrant=True)
    last(hidden).square().mean().backward()


@functools.cache
def compiled_once(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled(model: nn.Module, x: Tensor) -> None:
    compiled_once(model)(x).square().mean().backward()


def into_some(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward(inputs=list(model.parameters())[:3])


def accumulated(model: nn.Module, x: Tensor) -> None:
    for rows in x.split(4):
        (model(rows).square().mean() / 2).backward()


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        pytest.param(Coupled, by_parts, marks=pytest.mark.nightly),
        pytest.param(Coupled, recomputed, marks=pytest.mark.nightly),
        pytest.param(Coupled, compiled, marks=pytest.mark.nightly),
        (Following, at_once),
        pytest.param(Following, into_some, marks=pytest.mark.nightly),
        pytest.param(Following, accumulated, marks=pytest.mark.nightly),
    ],
)
def test_ranks_whose_kernels_round_differently_stay_the_same(
    kind: type[Coupled], step: Callable[[nn.Module, Tensor], None]
) -> None:
    pool.run(2, train_kind, kind.__name__, step.__name__)


def train_kind(kind: str, step: str) -> None:
    trained(divided(globals()[kind]), globals()[step])
