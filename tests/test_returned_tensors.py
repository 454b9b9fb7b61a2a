"""What a divided call returns is what one process would return, also where the script changes it in
place, or looks at it before it computes a loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.run import sharded_output
from pool import ranks
from sharded_training import Around, sharding

pytestmark = pytest.mark.slow

STEPS = 4


class ReturningInput(Around):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x


class ReturningBuffer(Around):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x) + self.table.sum(), self.table


class ReturningParameter(Around):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.body[0].weight


class ReturningRows(Around):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x.view(len(x), 2, 3)[:, 1]


class ReturningColumns(Around):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x.detach().T[1:3]


class ReturningPartOfBuffer(ReturningBuffer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x) + self.table.sum(), self.table[0]


class ReturningPartOfParameter(Around):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.body[0].weight.T[:4]


GIVEN = [ReturningInput, ReturningBuffer, ReturningParameter, ReturningRows, ReturningColumns]
GIVEN += [ReturningPartOfBuffer, ReturningPartOfParameter]


def halve_what_is_returned(make: Callable[[], nn.Module]) -> list[Tensor]:
    torch.manual_seed(0)
    model = make().double()
    found: list[Tensor] = []
    for _ in range(STEPS):
        x = torch.randn(8, 6).double()
        model.zero_grad()
        scores, other = model(x)
        (scores.square().mean() + other.square().sum()).backward()
        with torch.no_grad():
            other *= 0.5
        kept = [*model.parameters(), *model.buffers()]
        found += [x, scores, *kept, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [each.detach().clone() for each in found]


@pytest.mark.parametrize("make", GIVEN)
@ranks(2)
def test_what_a_forward_returns_as_it_was_given_is_the_script_s_own(
    make: Callable[[], nn.Module],
) -> None:
    expected = halve_what_is_returned(make)
    with sharding():
        found = halve_what_is_returned(make)
    assert modules.call_counts.sharded == STEPS
    torch.testing.assert_close(found, expected)


class Copying(Around):
    """Returns its input, and from the third call on a copy, where nobody watches."""

    copies = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), [x, x.clone()][self.copies]


@ranks(2)
def test_a_copy_in_place_of_what_was_given_is_a_copy() -> None:
    model, x = Copying().double(), torch.randn(8, 6).double()
    with sharding():
        assert model(x)[1] is x
        assert model(x)[1] is x
        model.copies = True
        for _ in range(3):
            other = model(x)[1]
            assert other is not x
            torch.testing.assert_close(other, x)


class ReturningBoth(Around):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return features, features.tanh()


def assert_same_when_divided(gradients: Callable[[], list[Tensor]]) -> None:
    """These gradients are the same where the calls before them are divided."""
    expected = gradients()
    with sharding():
        for _ in range(3):
            torch.testing.assert_close(gradients(), expected)
    assert modules.call_counts.sharded == 3


def looked_at(output: Tensor) -> Any:
    return output.argmax(1)


def looked_at_in_another_shape(output: Tensor) -> Any:
    return output.view(-1).square().sum()


@pytest.mark.parametrize("look", [looked_at, looked_at_in_another_shape])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@ranks(2)
def test_an_output_that_is_looked_at_without_gradients_keeps_its_own(
    mode: Any, look: Callable[[Tensor], Any]
) -> None:
    model, x = ReturningBoth().double(), torch.randn(8, 6).double()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        features, scores = model(x)
        with mode():
            look(features)
        (features.square().mean() + scores.square().mean()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert_same_when_divided(gradients)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
@ranks(2)
def test_a_target_that_is_broadcast_over_the_rows_is_no_target_of_rows(
    loss: Callable[..., Tensor], rows: int
) -> None:
    model = nn.Linear(6, rows).double()
    x, target = torch.randn(rows, 6).double(), torch.linspace(0, 1, rows).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this is rarely what a script means
        expected = loss(model(x), target)
        with sharding(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_output, "LARGE", 0)
            for _ in range(3):
                torch.testing.assert_close(loss(model(x), target), expected)
    assert modules.call_counts.sharded == 3


@ranks(2)
def test_a_hook_on_an_output_that_couples_rows_is_differentiated_again() -> None:
    model, x = ReturningBoth().double(), torch.randn(8, 6).double().requires_grad_()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        features, scores = model(x)
        features.register_hook(lambda grad: 2 * grad + grad.mean())
        (of_input,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        (scores.square().mean() + of_input.norm(dim=1).mean()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert_same_when_divided(gradients)
