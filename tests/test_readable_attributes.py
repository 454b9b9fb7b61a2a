"""Which attributes of a module its forward can read: only their changes bear on its calls."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.unedited.sharded_call.plan.module_state.attribute_changes import AttributeChanges
from pool import ranks
from sharded_training import sharding

pytestmark = pytest.mark.slow


class Driven(nn.Module):
    """Has what drives it as an attribute, as Lightning's modules have their Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.driver = types.SimpleNamespace(steps=0, best="")
        self.notes: list[int] = []

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    @property
    def steps(self) -> int:
        """Read of the driver."""
        return self.driver.steps

    @staticmethod
    def doubled(x: Tensor) -> Tensor:
        """Of twice the size."""
        return 2 * x

    def scaled(self, x: Tensor) -> Tensor:
        """By a number of the driver's."""
        return x * self.driver.steps


class NamesOnlyParts(Driven):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        sizes = [each.shape for each in self.parameters()]
        return self.doubled(self.net(x)), sizes, hasattr(self, "bias")


class NamesDriver(Driven):
    def forward(self, x: Tensor) -> Any:
        return x * self.driver.steps


class ReadsProperty(Driven):
    def forward(self, x: Tensor) -> Any:
        return x * self.steps


class CallsMethod(Driven):
    def forward(self, x: Tensor) -> Any:
        return [self.scaled(row) for row in x]


class NamesInText(Driven):
    def forward(self, x: Tensor) -> Any:
        return x * getattr(self, "driver").steps  # noqa: B009


class NamesComputed(Driven):
    def forward(self, x: Tensor) -> Any:
        return x * getattr(self, "dri" + "ver").steps


class HandsOut(Driven):
    def forward(self, x: Tensor) -> Any:
        return x * steps_of(self)


class CallsBase(NamesDriver):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class LooksIntoDict(Driven):
    def forward(self, x: Tensor) -> Any:
        return x * self.__dict__["driver"].steps


class HoldsFunction(Driven):
    def __init__(self) -> None:
        super().__init__()
        self.factor = lambda: self.driver.steps

    def forward(self, x: Tensor) -> Any:
        return x * self.factor()


class HoldsReference(Driven):
    def __init__(self) -> None:
        super().__init__()
        self.net.parent = weakref.ref(self)  # type: ignore[assignment]


class NamesVariable(Driven):
    def forward(self, x: Tensor) -> Any:
        return x * HELD["model"].driver.steps


class FindsOthers(Driven):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("driver" if name == "other" else name)


HELD: dict[str, Any] = {}


def steps_of(model: Any) -> int:
    """Read of the driver."""
    return model.driver.steps


def _due_after_step(module: Driven) -> int:
    HELD["model"] = module
    changes = AttributeChanges(module)
    changes.update()
    before = changes.due
    module.driver.steps += 1
    changes.update()
    due = changes.due - before
    module.driver.best = "other"  # which no expression of a forward reads
    changes.update()
    HELD.clear()
    assert bool(changes.flags) == (due > 0)
    return due


@pytest.mark.parametrize("kind", [Driven, NamesOnlyParts])
def test_what_a_forward_cannot_read_calls_for_no_comparison(kind: Callable[[], Driven]) -> None:
    assert _due_after_step(kind()) == 0


@pytest.mark.parametrize(
    "kind",
    [
        *(NamesDriver, ReadsProperty, CallsMethod, NamesInText, NamesComputed, HandsOut),
        *(CallsBase, LooksIntoDict, HoldsFunction, HoldsReference, NamesVariable, FindsOthers),
    ],
)
def test_what_a_forward_may_read_calls_for_a_comparison(kind: Callable[[], Driven]) -> None:
    assert _due_after_step(kind()) >= 1


def test_a_forward_of_the_object_s_own_may_read_all() -> None:
    module = Driven()
    module.forward = types.MethodType(lambda self, x: x * steps_of(self), module)
    assert _due_after_step(module) >= 1


def test_where_others_may_read_attributes_all_are_looked_at() -> None:
    module = Driven()
    changes = AttributeChanges(module)
    module.driver.best = "first"
    changes.update()
    assert changes.flags == frozenset()
    changes.read_any()
    module.driver.best = "second"
    changes.update()
    assert [value for _, value in changes.flags] == ["second"]


class Calls(Driven):
    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Any:
        return function(self.net(x))


@ranks(2)
def test_a_function_among_the_arguments_may_read_what_the_forward_does_not_name() -> None:
    torch.manual_seed(0)
    module = Calls().double()
    x = torch.randn(8, 2).double()

    def centred(y: Tensor) -> Tensor:
        return y - module.driver.steps * y.mean(0)

    with sharding():
        for step in range(8):
            module.driver.steps = step // 6
            found = module(x, centred)
            expected = centred(nn.functional.linear(x, module.net.weight, module.net.bias))
            torch.testing.assert_close(found, expected)
