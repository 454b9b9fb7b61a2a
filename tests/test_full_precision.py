"""Forwards under autocast that take something from other rows, less than half precision rounds."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.compare.call_comparison import autocast_cache_off
from pool import ranks
from sharded_training import batches, sharding

SHARE = 1e-3
"""Of what a row gets from others; the limit for outputs in bfloat16 is 3e-2."""


class Shares(nn.Module):
    def __init__(self, share: Callable[[Tensor], Tensor], turns_autocast_on: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.share, self.turns_autocast_on = share, turns_autocast_on

    def forward(self, x: Tensor) -> Tensor:
        on = torch.autocast("cpu", torch.bfloat16, enabled=self.turns_autocast_on)
        with on if self.turns_autocast_on else contextlib.nullcontext():
            hidden = self.first(x).relu()
            return self.last(hidden + self.share(hidden))


def train(model: nn.Module, of_input: Callable[[Tensor], Tensor]) -> str:
    """What is said of a training under autocast."""
    with sharding(), contextlib.redirect_stderr(io.StringIO()) as said:
        for x, y in batches(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(of_input(x)), y)
            loss.backward()
    return said.getvalue()


def row_before(x: Tensor) -> Tensor:
    return SHARE * x.roll(1, 0)


def median(x: Tensor) -> Tensor:
    return SHARE * x.median(0).values


def running_sum(x: Tensor) -> Tensor:
    return SHARE * x.cumsum(0) / len(x)


@pytest.mark.parametrize("share", [row_before, median, running_sum])
@ranks(2)
def test_a_small_share_of_other_rows_is_seen(share: Callable[[Tensor], Tensor]) -> None:
    said = train(Shares(share), Tensor.float)
    assert modules.call_counts.sharded == 0
    assert "Shares whole: its output" in said or torch.distributed.get_rank()


@pytest.mark.parametrize("of_input", [Tensor.float, Tensor.bfloat16])
@pytest.mark.parametrize("turns_autocast_on", [False, True])
@ranks(2)
def test_rows_of_their_own_are_divided(
    of_input: Callable[[Tensor], Tensor], turns_autocast_on: bool
) -> None:
    train(Shares(torch.zeros_like, turns_autocast_on), of_input)
    assert modules.call_counts.sharded > 0


def small_maps() -> nn.Module:
    """Batch normalisation over few numbers, which enlarges what half precision rounds."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Unflatten(1, (6, 1, 1)), nn.Upsample(8), nn.Conv2d(6, 8, 3)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))


@ranks(2)
def test_where_half_precision_rounds_much_what_holds_in_full_precision_holds() -> None:
    said = train(small_maps(), Tensor.float)
    assert (modules.call_counts.sharded > 0, modules.call_counts.whole, said) == (True, 0, "")


def test_what_is_cast_without_gradients_is_not_used_in_the_next_call() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad(), autocast_cache_off():
            model(x)
        model(x).sum().backward()
    assert model.weight.grad is not None
