"""Nested values: taken apart, and put together with other things in their places."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from instep.training.pytree import (
    ValueSnapshot,
    contents,
    find_tensors,
    flatten,
    flatten_arguments,
    is_column,
    unflatten,
)


@dataclass(frozen=True)
class Frozen:
    x: Any
    steps: int = 3
    late: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "late", self.x * 2)


@dataclass(slots=True)
class Slotted:
    inner: Frozen
    __private: Any = 1


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As several libraries have it: each field is an item too."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for each in fields(self):
            super().__setitem__(each.name, getattr(self, each.name))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("this is made once")


class Items(list):  # type: ignore[type-arg]
    name = "items"


class Pair(tuple):  # type: ignore[type-arg]
    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class Groups(defaultdict):  # type: ignore[type-arg]
    pass


class Own:
    def __init__(self, x: Any) -> None:
        self.x = x


Point = namedtuple("Point", "x y")
X = torch.ones(3)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ((X, [X], {"a": X}), 3),
        (Frozen(X), 2),
        (Slotted(Frozen(X)), 2),
        (ModelOutput(X, X * 2), 2),
        (SimpleNamespace(x=X, inner=SimpleNamespace(y=X)), 2),
        (Items([X, 1]), 1),
        (Pair(X, 2), 1),
        (Groups(list, {"a": X}), 1),
        (Point(X, 2), 1),
        (torch.max(torch.ones(2, 2), 0), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_is_put_together_again(value: Any, count: int) -> None:
    leaves, structure = flatten(value)
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == count
    doubled = [leaf * 2 if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    again = unflatten(doubled, structure)
    assert type(again) is type(value)
    assert flatten(again)[1] == structure
    for ours, theirs in zip(flatten(again)[0], leaves, strict=True):
        assert torch.equal(ours, theirs * 2) if isinstance(ours, Tensor) else ours == theirs


def test_what_is_an_item_and_an_attribute_remains_one_object() -> None:
    again = unflatten([1, 2], flatten(ModelOutput(X, X * 2))[1])
    assert (again.logits, again["loss"], list(again)) == (1, 2, ["logits", "loss"])


def test_structures_differ_by_keys_classes_and_numbers() -> None:
    values = [(X, X), [X, X], (X, X, X), {"a": X}, {"b": X}, Frozen(X), SimpleNamespace(x=X), X]
    structures = [flatten(value)[1] for value in values]
    for k, structure in enumerate(structures):
        assert [structure == other for other in structures].index(True) == k


def test_named_tuples_whose_classes_are_alike_have_one_structure() -> None:
    def make(name: str, fields: str) -> Any:
        return flatten(namedtuple(name, fields)(X, X))[1]  # type: ignore[misc]

    assert make("Features", "low high") == make("Features", "low high")
    assert make("Features", "low high") != make("Features", "high low")
    assert make("Features", "low high") != make("Others", "low high")
    assert make("Features", "low high") != flatten((X, X))[1]


@pytest.mark.parametrize(
    "value", [Own(X), nn.Linear(1, 1), {1, 2}, "abc", torch.float32, torch.Size([2]), range(3)]
)
def test_other_objects_are_leaves(value: Any) -> None:
    leaves, structure = flatten(value)
    assert structure is None
    assert leaves == [value]


def test_a_container_inside_of_itself_is_a_leaf() -> None:
    circle = SimpleNamespace(x=X)
    circle.itself = circle
    assert flatten(circle)[0] == [X, circle]


def test_a_list_of_plain_values_is_a_column() -> None:
    assert is_column(["a", "b"])
    assert is_column((("a", 1), {"b": [2.0]}))
    assert not is_column([])
    assert not is_column(["a", X])
    leaves, structure = flatten_arguments((X, ["a", "b"]), {"reduction": "sum"})
    assert leaves == [X, ["a", "b"], "sum"]
    assert unflatten(leaves, structure) == ((X, ["a", "b"]), {"reduction": "sum"})


def test_tensors_are_found_in_objects_of_any_class() -> None:
    assert find_tensors(Own([{"a": Own(X)}, SimpleNamespace(x=X)])) == [X]
    assert len(contents([[k] for k in range(10**4)])) < 10**4 + 10


CHANGES = {
    "an attribute of an object": (Own(1), lambda own: setattr(own, "x", 2)),
    "a list in an object": (Own([]), lambda own: own.x.append(X)),
    "a tensor in an object": (Own(torch.ones(2)), lambda own: own.x.add_(1)),
    "a key": ({"a": X}, lambda it: it.pop("a")),
    "a value": ({"a": 1}, lambda it: it.update(a=2)),
    "a value's type": ({"a": 1}, lambda it: it.update(a=True)),
    "an array": (np.zeros(3), lambda array: array.fill(1.0)),
    "torch's generator": (torch.Generator(), lambda g: torch.rand(1, generator=g)),
    "numpy's generator": (np.random.default_rng(0), lambda g: g.random()),
    "numpy's old generator": (np.random.RandomState(0), lambda g: g.random_sample()),
    "Python's generator": (random.Random(0), lambda g: g.random()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_in_a_value_is_seen(what: str) -> None:
    value, change = CHANGES[what]
    given = ValueSnapshot((value,))
    assert given.is_current()
    change(value)
    assert not given.is_current()
