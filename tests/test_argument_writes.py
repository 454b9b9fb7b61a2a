"""Forwards that write their results into a dict of the script's, as sentence-transformers' do."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.unedited.sharded_call import modules
from pool import ranks
from sharded_training import sharding

pytestmark = pytest.mark.slow


class Features(UserDict[str, Any]):
    """As transformers' BatchEncoding."""


class Writing(nn.Module):
    """Calls `write` with a dict of the script's, and what it has computed."""

    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.write = nn.Linear(4, 3), write

    def forward(self, features: Any) -> Any:
        return self.write(features, self.body(features["x"]).tanh())


def add_and_return(features: Any, y: Tensor) -> Any:
    features.update(y=y, length=2)
    return features


def add_and_return_nothing(features: Any, y: Tensor) -> None:
    features["y"] = y


def add_and_return_another(features: Any, y: Tensor) -> Tensor:
    features["y"] = y
    return y.square()


def replace(features: Any, y: Tensor) -> Any:
    features["x"] = y
    return features


def remove(features: Any, y: Tensor) -> Any:
    del features["x"]
    features["y"] = y
    return features


WRITES = (add_and_return, add_and_return_nothing, add_and_return_another, replace, remove)


def trained(
    write: Callable[[Any, Tensor], Any], make: type, sizes: tuple[int, ...]
) -> tuple[list[Any], list[Tensor]]:
    """What calls have left in the script's dicts, and returned; the tensors, and the gradients."""
    model, facts, tensors = Writing(write), list[Any](), list[Tensor]()
    for k, size in enumerate(sizes):
        x = torch.arange(4.0 * size).view(size, 4).sin() + k
        features = make(x=x, name="batch")
        returned = model(features)
        kept = "x" in features and features["x"] is x
        facts.append((returned is features, [*features], features["name"], kept))
        y = features["y"] if "y" in features else features["x"]
        loss = y.square().mean()
        if isinstance(returned, Tensor):
            loss = loss + returned.mean()
        loss.backward()
        tensors.append(y)
    return facts, [*tensors, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("make", [dict, Features])
@pytest.mark.parametrize("write", WRITES)
@ranks(3)
def test_what_a_forward_writes_into_a_dict_is_that_of_the_whole_batch(
    write: Callable[[Any, Tensor], Any], make: type
) -> None:
    sizes = (6, 7, 6, 5)
    plain_facts, plain_tensors = trained(write, make, sizes)
    with sharding() as log:
        facts, tensors = trained(write, make, sizes)
    assert (modules.call_counts.sharded, log.getvalue()) == (len(sizes), "")
    assert facts == plain_facts
    torch.testing.assert_close(tensors, plain_tensors, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_tensor_that_the_script_put_there_stays_the_same_object() -> None:
    model, x = Writing(add_and_return), torch.ones(4, 4)
    for _ in range(3):
        features = {"x": x}
        with sharding():
            assert model(features) is features
        assert features["x"] is x
        assert modules.call_counts.sharded == 1


def write_into_nested(features: Any, y: Tensor) -> Tensor:
    features["nested"]["y"] = y
    return y


def append_to_list(features: Any, y: Tensor) -> Tensor:
    features["kept"].append(len(y))
    return y


@pytest.mark.parametrize("write", [write_into_nested, append_to_list])
@ranks(2)
def test_what_is_written_further_inside_is_computed_whole(
    write: Callable[[Any, Tensor], Any],
) -> None:
    model = Writing(write)
    features: dict[str, Any] = {"x": torch.ones(4, 4), "nested": {}, "kept": []}
    with sharding() as log:
        y = model(features)
    assert instep.rank != 0 or "Writing whole: its forward changes its arguments." in log.getvalue()
    assert features["kept"] == [4] or features["nested"]["y"] is y


def set_attribute(features: Any, y: Tensor) -> Tensor:
    features.rows = len(y)
    return y


@ranks(2)
def test_what_is_written_into_the_attributes_of_a_dict_is_computed_whole() -> None:
    model, seen = Writing(set_attribute), []
    with sharding() as log:
        for _ in range(3):
            features = Features(x=torch.ones(4, 4))
            features.rows = 0  # type: ignore[attr-defined]
            model(features)
            seen.append(features.rows)  # type: ignore[attr-defined]
    assert instep.rank != 0 or "Writing whole: its forward changes its arguments." in log.getvalue()
    assert seen == [4, 4, 4]


@ranks(2)
def test_a_forward_that_begins_to_write_later() -> None:
    late = {"from": 3}

    def write(features: Any, y: Tensor) -> Tensor:
        late["from"] -= 1
        if late["from"] < 0:
            features["y"] = y
        return y

    model = Writing(write)
    x = torch.ones(4, 4)
    seen = []
    with sharding():
        for _ in range(4):
            features = {"x": x}
            model(features)
            seen.append("y" in features)
    assert seen == [False, False, False, True]
