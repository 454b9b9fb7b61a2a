"""Reductions over the rows that make no difference before the weights have grown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from instep.unedited.sharded_call import modules
from pool import ranks
from sharded_training import sharding

pytestmark = pytest.mark.slow

Function = Callable[[Tensor], Tensor]

WHOLE: dict[str, Function] = {
    "max": lambda x: x * (80 / x.norm(dim=1).max()).clamp(max=1),
    "amax": lambda x: x * (80 / torch.amax(x.norm(dim=1))).clamp(max=1),
    "std": lambda x: x * (40 / x.std()).clamp(max=1),
    "norm": lambda x: x * (400 / x.norm()).clamp(max=1),
    "linalg.norm": lambda x: x * (400 / torch.linalg.norm(x)).clamp(max=1),
    "topk": lambda x: x * (80 / x.norm(dim=1).topk(2).values.mean()).clamp(max=1),
    "sort": lambda x: x * (80 / x.norm(dim=1).sort().values[-1]).clamp(max=1),
    "quantile": lambda x: x * (40 / x.abs().quantile(0.9)).clamp(max=1),
    "any": lambda x: torch.where((x.abs() > 60).any(), x - x.mean(0), x),
    "all": lambda x: x + x.mean(0) * ~torch.all(x.abs() < 60),
    "a small min": lambda x: (
        x * x.norm(dim=1).min().clamp(1e-3, 1e-3) * 1e3 + torch.relu(x.norm(dim=1).min() - 60)
    ),
}


def averaged_up_to(x: Tensor) -> Tensor:
    mean, rows = torch.zeros_like(x[0]), []
    for row in x:
        mean = 0.9 * mean + row
        rows.append(row * (4000 / mean.norm()).clamp(max=1))
    return torch.stack(rows)


ONE_ROW: dict[str, Function] = {
    "the first": lambda x: x * (400 / x[0].norm()).clamp(max=1),
    "the last": lambda x: x + (x[-1:].norm() - 400).relu(),
    "a gate": lambda x: x - x[0] * (x.abs().mean() - 40).relu(),
    "by its number": lambda x: x + (x.index_select(0, torch.zeros(1).long()).norm() - 400).relu(),
    "a loop": averaged_up_to,
}
IN_TORCH: dict[str, Function] = {
    "normalize": lambda x: x + functional.normalize(x, dim=0) * functional.relu(x.abs() - 60),
    "softmax": lambda x: x + functional.softmax(x, dim=0) * functional.relu(x.abs() - 60),
    "a product": lambda x: x * (4000 / (x.mT @ x).diagonal().max()).clamp(max=1),
    "cov": lambda x: x + functional.relu(torch.cov(x.T).diagonal() - 900),
    "total norm": lambda x: (
        x * (400 / nn.utils.get_total_norm([x.detach()])).clamp(max=1)  # type: ignore[no-untyped-call]
    ),
    "cumulative": lambda x: x + functional.relu(x.abs().logcumsumexp(0) - 80),
    "along the rows": lambda x: x + functional.relu(torch.fft.rfft(x, dim=0).abs().amax() - 4000),
    "a loss of triplets": lambda x: (
        x + functional.triplet_margin_with_distance_loss(x, torch.zeros_like(x), x + 15)
    ),
    "rows in the second dimension": lambda x: (
        x * (400 / x.T.square().sum(1).sum().sqrt()).clamp(max=1)
    ),
}
PAIRS: dict[str, Function] = {
    "products": lambda x: (
        x + functional.relu((x @ x.T).fill_diagonal_(0) - 3000).mean(1, keepdim=True)
    ),
    "distances": lambda x: x + functional.relu(torch.cdist(x, x) - 250).mean(1, keepdim=True),
    "a condition": lambda x: (
        x + torch.where(torch.cdist(x, x) > 250, 1.0, 0.0).sum(1, keepdim=True)
    ),
    "einsum": lambda x: (
        x + torch.einsum("id,jd->ij", x, x).clamp(min=3000).fill_diagonal_(3000).sum(1)[:, None]
    ),
    "differences": lambda x: (
        x + functional.relu((x[:, None] - x[None]).square().mean(-1) - 9000).sum(1)[:, None]
    ),
}
DIVIDED: dict[str, Function] = {
    "a root of a mean": lambda x: x * (40 / x.square().mean().sqrt()).clamp(max=1),
    "a condition": lambda x: torch.where(x.abs().mean() > 40, x / x.abs().mean(), x),
    "a mean of rows": lambda x: x * (20 / x.mean(0).norm()).clamp(max=1),
    "a hinge": lambda x: x * (1 + (x.abs().mean() - 40).relu()),
    "a mean of a hinge": lambda x: x + (x.abs() - 60).relu().mean(),
    "a shift": lambda x: (x - x.max()).softmax(1),
    "a sum as a product": lambda x: torch.dot(x.flatten(), x.flatten().tanh()),
    "products with itself": lambda x: x + functional.relu((x @ x.T).diagonal() - 3000)[:, None],
    "a row in place": lambda x: x.clone().index_fill_(0, torch.tensor([], dtype=torch.long), 0.0),
    "rows in one dimension with others": lambda x: (
        x.view(-1, 4, 4).transpose(0, 1).reshape(-1, 4).tanh().view(4, -1, 4).sum(0).repeat(1, 4)
    ),
    "sorted and back": lambda x: x[x[:, 0].argsort()][x[:, 0].argsort().argsort()],
    "heads": lambda x: (x.view(-1, 4, 4) @ x.view(-1, 4, 4).mT).softmax(-1).flatten(1) + x,
    "rows of their own": lambda x: x / x.amax(1, keepdim=True) + x.std(1, keepdim=True),
}


class Limited(nn.Module):
    """A layer, whose outputs a function limits."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 16), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def _train(function: Function) -> None:
    """Each output is that of the whole batch, before the weights have grown and afterwards."""
    torch.manual_seed(0)
    module = Limited(function).double()
    for step in range(6):
        x = torch.randn(16, 6).double() * torch.linspace(0.5, 2, 16).double()[:, None]
        if step == 3:
            with torch.no_grad():
                module.layer.weight *= 160
        output = module(x)
        output.sum().backward()
        expected = function(nn.functional.linear(x, module.layer.weight, module.layer.bias))
        torch.testing.assert_close(output, expected)


@ranks(2)
@pytest.mark.parametrize("name", WHOLE | IN_TORCH | PAIRS | ONE_ROW)
def test_a_reduction_that_makes_a_difference_later_is_over_the_whole_batch(name: str) -> None:
    with sharding():
        _train((WHOLE | IN_TORCH | PAIRS | ONE_ROW)[name])
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 6)


@ranks(2)
@pytest.mark.parametrize("name", DIVIDED)
def test_sums_over_all_ranks_and_what_never_makes_a_difference_stay_divided(name: str) -> None:
    with sharding():
        _train(DIVIDED[name])
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (6, 0)
