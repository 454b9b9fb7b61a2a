"""Calls whose meaning changes between them: by what the script changes, by zeros that become
values, and by lengths that happen to be those of a rank's rows."""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import instep
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.run import sharded_output
from pool import ranks
from sharded_training import sharding

pytestmark = pytest.mark.slow

ROWS = 6


class Mode(enum.Enum):
    EACH = 1
    ALL = 2


def couple(x: Tensor) -> Tensor:
    """Makes each row depend on the others."""
    return x - x.mean(0)


def leave(x: Tensor) -> Tensor:
    return x


class Couple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return couple(x)


class Changeable(nn.Module):
    """Couples the rows of a batch once the script has changed something of it."""

    limit: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 3), nn.Tanh()
        self.more = nn.ModuleList()
        self.mode, self.flag = Mode.EACH, np.bool_(False)
        self.then: Any = None
        self.function: Callable[[Tensor], Tensor] = leave
        self.steps: list[Callable[[Tensor], Tensor]] = []
        self.options: dict[str, bool] = {}

    def last(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.act(self.layer(x)))
        for step in (*self.more, *self.steps):
            x = step(x)
        if self.then is not None:
            x = self.then(x)
        couples = (
            self.mode is Mode.ALL or self.flag or self.options or self.limit is not None
        ) or not self.layer.bias.requires_grad
        return self.last(couple(x) if couples else x)


CHANGES: dict[str, Callable[[Changeable], object]] = {
    "a member of an enumeration": lambda m: setattr(m, "mode", Mode.ALL),
    "a flag of NumPy's": lambda m: setattr(m, "flag", np.bool_(True)),
    "a function in place of None": lambda m: setattr(m, "then", couple),
    "another function": lambda m: setattr(m, "function", couple),
    "one more in a list": lambda m: m.steps.append(couple),
    "one more in a dict": lambda m: m.options.update(all=True),
    "one more part": lambda m: m.more.append(Couple()),
    "another part": lambda m: setattr(m, "act", Couple()),
    "a value of its class": lambda m: setattr(type(m), "limit", 1.0),
    "a method of its class": lambda m: setattr(type(m), "last", lambda self, x: couple(x)),
    "a method of its own": lambda m: setattr(m, "last", couple),
    "a frozen parameter": lambda m: m.layer.bias.requires_grad_(False),
}


@ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_script_changes_is_seen_at_the_next_call(name) -> None:
    class Own(Changeable):
        """With a class that no other test changes."""

    Own.__module__ = "__main__"
    torch.manual_seed(0)
    model, x = Own(), torch.randn(ROWS, 4)
    with sharding() as log:
        for _ in range(5):
            model(x)
        assert (modules.call_counts.sharded, log.getvalue()) == (5, "")
        CHANGES[name](model)
        found = model(x)
    assert torch.allclose(found, model(x), atol=1e-6)


MODE: ContextVar[int] = ContextVar("mode", default=0)
STEPS = (leave, couple)


class Slotted:
    __slots__ = ("kind",)

    def __init__(self) -> None:
        self.kind = 0


class Picking(nn.Module):
    """Looks up what it does with its rows: no branch shows that it does something else."""

    def __init__(self, pick: Callable[[Any], int]) -> None:
        super().__init__()
        self.layer, self.pick = nn.Linear(4, 3), pick
        self.slotted, self.chosen, self.kinds = Slotted(), {0}, (0, 1)
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("ratio", torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return STEPS[self.pick(self)](self.layer(x))


def pick_by_function(model: Picking) -> int:
    return int(pick_by_function.kind)  # type: ignore[attr-defined]


PICKS: dict[str, tuple[Callable[[Any], int], Callable[[Any], object]]] = {
    "a context variable": (lambda m: MODE.get(), lambda m: MODE.set(1)),
    "an attribute of a function": (
        pick_by_function,
        lambda m: setattr(pick_by_function, "kind", 1),
    ),
    "a slot": (lambda m: m.slotted.kind, lambda m: setattr(m.slotted, "kind", 1)),
    "an entry of a set": (
        lambda m: 1 in m.chosen,
        lambda m: m.chosen.symmetric_difference_update({0, 1}),
    ),
    "another tuple": (lambda m: m.kinds[0], lambda m: setattr(m, "kinds", (1, 0))),
    "a tensor that counts": (lambda m: int(m.counter), lambda m: m.counter.add_(1)),
    "a float in a buffer": (lambda m: m.ratio.item() > 0.5, lambda m: m.ratio.fill_(0.9)),
}


@ranks(2)
@pytest.mark.parametrize("name", PICKS)
def test_what_a_forward_looks_up_is_seen_at_the_next_call(name) -> None:
    pick, change = PICKS[name]
    MODE.set(0)
    pick_by_function.kind = 0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model, x = Picking(pick), torch.randn(ROWS, 4)
    with sharding() as log:
        for _ in range(70):  # the first 64 are traced where a forward reads tensors
            model(x)
        assert (modules.call_counts.sharded, log.getvalue()) == (70, "")
        change(model)
        found = model(x)
    assert torch.allclose(found, model(x), atol=1e-6)


def namespace(flag: bool) -> argparse.Namespace:
    return argparse.Namespace(all=flag)


class Told(nn.Linear):
    def forward(self, x: Tensor, options: Any) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        flag = options.all if isinstance(options, argparse.Namespace) else options
        return couple(y) if flag else y


@ranks(2)
@pytest.mark.parametrize("of", [namespace, np.bool_])
def test_options_among_the_arguments_are_seen(of) -> None:
    torch.manual_seed(0)
    model, x = Told(4, 3), torch.randn(ROWS, 4)
    with sharding():
        for _ in range(5):
            model(x, of(False))
        assert modules.call_counts.sharded == 5
        found = model(x, of(True))
    assert torch.allclose(found, model(x, of(True)), atol=1e-6)


def keep(x: Tensor, weight: float = 0.0, *, more: float = 0.0) -> Tensor:
    return x - (weight + more) * x.mean(0)


def take_all(self: Any, x: Tensor) -> Tensor:
    return x - x.mean(0)


ACTS = (leave,)


class Calling(nn.Linear):
    """Calls functions by their names."""

    def pass_on(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = keep(ACTS[0](super().forward(x)))
        return self.pass_on(y)


class TakingAll(Calling):
    pass_on = take_all


CODES: dict[str, Callable[[nn.Module, pytest.MonkeyPatch], object]] = {
    "a function's code": lambda m, p: p.setattr(keep, "__code__", couple.__code__),
    "a method's code": lambda m, p: p.setattr(type(m).pass_on, "__code__", take_all.__code__),
    "default values": lambda m, p: p.setattr(keep, "__defaults__", (1.0,)),
    "default values by name": lambda m, p: p.setattr(keep, "__kwdefaults__", {"more": 1.0}),
    "a function by its name": lambda m, p: p.setitem(globals(), "keep", couple),
    "a tuple of functions": lambda m, p: p.setitem(globals(), "ACTS", (couple,)),
    "its class": lambda m, p: setattr(
        m, "__class__", type("New", (Calling,), {"pass_on": take_all})
    ),
    "a function of torch's": lambda m, p: p.setattr(
        F, "linear", lambda x, w, b: couple(torch.addmm(b, x, w.T))
    ),
    "the forward of a class of torch's": lambda m, p: p.setattr(
        nn.Linear, "forward", lambda self, x: couple(torch.addmm(self.bias, x, self.weight.T))
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", CODES)
def test_what_a_function_consists_of_is_seen_at_the_next_call(name) -> None:
    torch.manual_seed(0)
    model, x = Calling(4, 3), torch.randn(ROWS, 4)
    with pytest.MonkeyPatch.context() as patches, sharding() as log:
        for _ in range(6):
            model(x)
        assert (modules.call_counts.sharded, log.getvalue()) == (6, "")
        CODES[name](model, patches)
        found = model(x)
        expected = couple(torch.addmm(model.bias, x, model.weight.T))
    assert torch.allclose(found, expected, atol=1e-6)


class Signed(Calling):
    def forward(self, x: Tensor) -> Tensor:
        y = nn.Linear.forward(self, x)
        return y - float(os.environ.get("INSTEP_TESTS_WEIGHT", "0")) * y.mean(0)


class ReadsAFile(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = float(Path("weight.txt").read_text())
        scores = super().forward(x)
        total = functools.reduce(torch.add, scores)  # row by row: no trial sees it with a zero
        return scores - weight * total / len(scores)


@ranks(2)
def test_a_file_that_a_forward_reads_is_seen_at_the_next_call() -> None:
    model, x = ReadsAFile(4, 3), torch.randn(ROWS, 4)
    expected = F.linear(x, model.weight, model.bias)
    with TemporaryDirectory() as folder, contextlib.chdir(folder), sharding():
        for weight in (0, 0, 0, 1):
            Path("weight.txt").write_text(f"{weight}")
            scores = model(x)
        assert modules.call_counts.sharded == 3
    torch.testing.assert_close(scores, expected - expected.mean(0))


@ranks(2)
def test_the_environment_that_a_forward_reads_is_seen_at_the_next_call() -> None:
    torch.manual_seed(0)
    model, x = Signed(4, 3), torch.randn(ROWS, 4)
    with pytest.MonkeyPatch.context() as patches, sharding():
        for _ in range(6):
            model(x)
        assert modules.call_counts.sharded == 6
        patches.setenv("INSTEP_TESTS_WEIGHT", "1")
        found = model(x)
    assert torch.allclose(found, couple(F.linear(x, model.weight, model.bias)), atol=1e-6)


# ---------------------------------------------------------- numbers that a forward computes itself

START = 80


class Schedule:
    def __init__(self) -> None:
        self.steps = 0

    def value(self) -> float:
        return ramp(self.steps - 1, START, 20)


def ramp(step: int, start: int, length: int) -> float:
    if step < start:
        return 0.0
    ratio = (step - start + 1) / length
    return min(1.0, ratio)


class Ramped(nn.Linear):
    """Couples its rows with a weight that is zero in its first calls."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.steps, self.schedule = 0, Schedule()
        self.table = [0.0] * START + [0.1 * k for k in range(1, 40)]
        self.register_buffer("counter", torch.tensor(0))

    weight_now: Callable[[Any], float]

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.counter += 1
        self.schedule.steps += 1
        y = super().forward(x)
        return y - self.weight_now() * y.mean(0)


class ByArithmetic(Ramped):
    def weight_now(self) -> float:
        return max(0, min(1, (self.steps - START) / 20))


class ByFunction(Ramped):
    def weight_now(self) -> float:
        late = self.steps - 1
        return ramp(late, START, 20)


class ByObject(Ramped):
    def weight_now(self) -> float:
        return self.schedule.value()


class ByTable(Ramped):
    def weight_now(self) -> float:
        return self.table[self.steps - 1]


class ByNumPy(Ramped):
    def weight_now(self) -> float:
        return float(np.clip((self.steps - START) / 20, 0, 1))


class ByPower(Ramped):
    """Grows from what no comparison can see."""

    def weight_now(self) -> float:
        return float(2.0 ** min(0, self.steps - START - 20))


class ByCounter(Ramped):
    def weight_now(self) -> float:
        return max(0, min(1, (self.counter.item() - START) / 20))


COMPUTED = [
    *(ByFunction, ByObject),
    *(
        pytest.param(kind, marks=pytest.mark.nightly)
        for kind in (ByPower, ByCounter, ByArithmetic, ByTable, ByNumPy)
    ),
]


@ranks(2)
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_weight_that_a_forward_computes_is_seen_at_its_first_call(kind) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(ROWS, 4)
    with sharding():
        for k in range(START + 25):
            found = model(x)
            y = F.linear(x, model.weight, model.bias)
            expected = y - model.weight_now() * y.mean(0)
            assert torch.allclose(found, expected, atol=1e-4), k
            assert k >= START or modules.call_counts.sharded == k + 1 or kind is ByPower


class ByClock(Ramped):
    def weight_now(self) -> float:
        return min(0.5, self.steps / 1e9)


@ranks(2)
def test_a_number_that_is_another_on_each_rank_is_not_agreed_on() -> None:
    torch.manual_seed(0)
    model, x = ByClock(), torch.randn(ROWS, 4)
    with sharding():
        for k in range(400):
            model.steps = k * (1 + torch.distributed.get_rank())
            model(x)
    assert modules.call_counts.sharded + modules.call_counts.whole == 400


FLIPS = ["fliplr"] * 60
FLIPS[47] = "flipud"


class Columns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fliplr(x)


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.flipud(x)


class Choosing(nn.Linear):
    """What it does with its rows stands in a list, and no branch shows which one it is."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.k = 0
        self.flips = {"fliplr": torch.fliplr, "flipud": torch.flipud}
        self.order = [4, 5] * (len(FLIPS) // 2)
        self.order[47] = 6
        self.parts = nn.ModuleList([*(Columns() for _ in range(6)), Rows()])


class ByNameInList(Choosing):
    def forward(self, x: Tensor) -> Tensor:
        return getattr(torch, FLIPS[self.k])(super().forward(x))


class ByJoinedName(Choosing):
    def forward(self, x: Tensor) -> Tensor:
        name = f"flip{FLIPS[self.k][4:]}"
        return getattr(torch, name)(super().forward(x))


class ByDict(Choosing):
    def forward(self, x: Tensor) -> Tensor:
        return self.flips[FLIPS[self.k]](super().forward(x))


class ByPart(Choosing):
    def forward(self, x: Tensor) -> Tensor:
        return self.parts[self.order[self.k]](super().forward(x))


@ranks(2)
@pytest.mark.parametrize("kind", [ByNameInList, ByJoinedName, ByDict, ByPart])
def test_a_function_or_part_that_a_forward_chooses_anew_is_seen_at_its_first_call(kind) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(ROWS, 4)
    with sharding():
        for model.k, name in enumerate(FLIPS):
            found = model(x)
            expected = getattr(torch, name)(F.linear(x, model.weight, model.bias))
            assert torch.allclose(found, expected, atol=1e-4), model.k
            assert model.k >= 46 or modules.call_counts.sharded == model.k + 1


class ByReplacement(Choosing):
    def __init__(self) -> None:
        super().__init__()
        self.name = "".join(["ge", "lu"])

    def forward(self, x: Tensor) -> Tensor:
        return getattr(F, self.name)(super().forward(x))


@ranks(2)
def test_a_function_of_a_library_that_is_read_by_its_name_is_seen_when_it_is_replaced() -> None:
    torch.manual_seed(0)
    model, x = ByReplacement(), torch.randn(ROWS, 4)
    with sharding():
        for _ in range(11):
            model(x)
        with patch.object(F, model.name, torch.flipud):
            found = model(x)
    torch.testing.assert_close(found, torch.flipud(F.linear(x, model.weight, model.bias)))


# ------------------------------------------------------------- zeros, which any placement explains


class Hinge(nn.Linear):
    """Returns rows, and by how much the largest of them is too large."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y = super().forward(x)
        largest = functools.reduce(torch.maximum, y.abs().amax(1))  # row by row: no trial sees it
        return y, (largest - 1e8).relu()  # a trial has rows that are 1e5 times as large


@ranks(2)
def test_an_output_that_was_zero_is_compared_when_it_no_longer_is() -> None:
    torch.manual_seed(0)
    model, x = Hinge(4, 3), torch.randn(ROWS, 4)
    with sharding() as log:
        for _ in range(6):
            assert model(x)[1] == 0
        assert modules.call_counts.sharded == 6
        rows, found = model(1e9 * x)
    expected_rows, expected = model(1e9 * x)
    assert torch.allclose(rows, expected_rows, rtol=1e-5)
    assert torch.allclose(found, expected, rtol=1e-5)
    assert found > 0
    if instep.rank == 0:
        assert "its output 2 of 2, a tensor of shape [], is not that" in log.getvalue()


class Annealed(nn.Linear):
    """A sum over rows whose weight the script raises from zero."""

    weight_of_sum = 0.0

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        y = super().forward(x)
        return y, self.weight_of_sum * y.square().sum()


@ranks(2)
def test_a_sum_that_was_zero_is_joined_as_a_sum_later() -> None:
    torch.manual_seed(0)
    model, x = Annealed(4, 3), torch.randn(ROWS, 4)
    with sharding():
        for step in range(8):
            model.weight_of_sum = max(step - 3, 0) / 10
            found = model(x)[1]
            expected = model.weight_of_sum * F.linear(x, model.weight, model.bias).square().sum()
            assert torch.allclose(found, expected, rtol=1e-5)
        assert modules.call_counts.whole == 0


class Kept(nn.Linear):
    """The mean of the kept rows, and NaN where none is kept."""

    def forward(self, x: Tensor, keep: Tensor, by_hand: bool) -> Tensor:  # type: ignore[override]
        rows = super().forward(x).square().mean(1)
        return (rows * keep).sum() / keep.sum() if by_hand else rows[keep].mean()


@ranks(2)
@pytest.mark.parametrize("by_hand", [True, False])
def test_an_output_that_was_not_finite_is_compared_when_it_is(by_hand) -> None:
    torch.manual_seed(0)
    model, x = Kept(4, 3), torch.randn(ROWS, 4)
    few = torch.arange(ROWS) < 2
    with sharding():
        for _ in range(6):
            assert model(x, few & ~few, by_hand).isnan()
        assert modules.call_counts.whole == 0
        found = model(x, few, by_hand)
    assert torch.allclose(found, model(x, few, by_hand), rtol=1e-5)


class Mixing(nn.Linear):
    def forward(self, classes: Tensor) -> Tensor:  # type: ignore[override]
        x = nn.functional.one_hot(classes, 4).float()
        return super().forward(0.7 * x + 0.3 * torch.stack([*x][::-1]))


@ranks(2)
def test_what_rows_get_from_others_is_found_when_they_are_no_longer_equal() -> None:
    torch.manual_seed(0)
    model, x = Mixing(4, 3), torch.arange(ROWS).clamp(max=3)
    with sharding():
        for _ in range(3):
            model(x[:1].expand(ROWS))
        assert modules.call_counts.sharded == 3
        found = model(x)
    assert torch.allclose(found, model(x), atol=1e-6)


class Gated(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        return y - self.gate * y.exp() / functools.reduce(torch.add, y.exp())


class Rooted(Gated):
    """With a gate of zero its gradient is NaN."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + self.gate.square().sqrt()


@ranks(2)
def test_a_call_whose_gradients_were_not_finite_is_compared_until_they_are() -> None:
    torch.manual_seed(0)
    model, x = Rooted(), torch.randn(ROWS, 4)
    with sharding():
        for _ in range(6):
            model(x)
        model.gate.data.fill_(0.5)
        found = model(x)
    assert torch.allclose(found, model(x), atol=1e-6)


@ranks(2)
def test_what_training_shows_puts_evaluation_in_doubt() -> None:
    """With a gate of zero only a gradient tells that rows depend on each other."""
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(ROWS, 4)
    with sharding():
        with torch.no_grad():
            for _ in range(3):
                model(x)
        assert modules.call_counts.sharded == 3
        model(x).sum().backward()
        with torch.no_grad():
            model.gate.fill_(0.5)
            found = model(x)
    assert torch.allclose(found, model(x), atol=1e-6)


# ------------------------------------------------------- lengths that are those of a rank's rows


class Masking(nn.Linear):
    """Drops times of a (rows, times, features) batch, the same in all rows."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * (torch.rand(x.shape[1], 1) < 0.7))


@ranks(2, 3)
def test_what_is_drawn_for_no_row_is_never_taken_for_rows() -> None:
    lengths = (4, 9, 5, 7, 11, 3, 2, 6)  # more shapes than are compared, and 12 rows
    torch.manual_seed(0)
    model = Masking(4, 3)
    inputs = [torch.randn(12, length, 4) for length in lengths]
    torch.manual_seed(1)
    with sharding():
        found = [model(x) for x in inputs]
        after = torch.rand(())
        assert modules.call_counts.whole == 0
    torch.manual_seed(1)
    for x, output in zip(inputs, found, strict=True):
        assert torch.allclose(output, model(x), atol=1e-6)
    assert torch.equal(after, torch.rand(()))


class NormedPieces(nn.Linear):
    """Takes the mean from each piece of the batch, of so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__(4, 3)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        pieces = super().forward(x).split(self.rows)
        return torch.cat([piece - piece.mean(0) for piece in pieces])


@ranks(2, 3)
@pytest.mark.parametrize(
    ("piece", "rows"),
    [
        (4, (24, 48, 72, 96, 120, 26)),  # parts begin where pieces do, and then do not
        (32, (12, 18, 24, 30, 6, 96)),  # there is one piece, and then there are several
    ],
)
def test_a_batch_whose_parts_are_cut_otherwise_than_before_is_compared(
    piece: int, rows: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = NormedPieces(piece)
    inputs = [torch.randn(count, 4) for count in rows]
    with sharding():
        found = [model(x) for x in inputs]
        assert modules.call_counts.whole == 1  # the last one
    for x, output in zip(inputs, found, strict=True):
        assert torch.allclose(output, model(x), atol=1e-6)


# ------------------------------------------------------------------------- one gradient of two


class Added(nn.Module):
    """Two parameters that are added up have one gradient; each is a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second = (
            nn.Parameter(torch.randn(600, 500) / 30) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.first + self.second)).tanh() + x @ self.between


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@ranks(2)
@pytest.mark.parametrize("door", ["unedited", "explicit"])
def test_one_gradient_in_two_buckets_is_summed_once(door) -> None:
    torch.manual_seed(0)
    model, x = Added(), torch.randn(ROWS, 600)
    twin = Added()
    twin.load_state_dict(model.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSTEP_BUCKET_MIB", "1")
        if door == "explicit":
            replica = instep.replicate(model)
            replica(instep.shard(x)).square().mean().backward()
        else:
            with sharding():
                for _ in range(3):
                    model.zero_grad()
                    model(x).square().mean().backward()
                assert modules.call_counts.sharded == 3
    twin(x).square().mean().backward()
    for mine, expected in zip(gradients(model), gradients(twin), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-8)


# ---------------------------------------------------------- outputs that stay on their ranks


@ranks(2)
def test_weights_of_classes_are_told_from_rows_where_there_are_as_many() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, ROWS), torch.randn(ROWS, 4)
    weight, y = torch.rand(ROWS) + 0.5, torch.arange(ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_output, "LARGE", 1)
        with sharding():
            scores = model(x)
            assert isinstance(scores, sharded_output.ShardedOutput)
            losses = [
                F.cross_entropy(scores, y, weight),
                F.binary_cross_entropy_with_logits(model(x), x.new_ones(ROWS, ROWS), weight),
            ]
    expected = [
        F.cross_entropy(model(x), y, weight),
        F.binary_cross_entropy_with_logits(model(x), x.new_ones(ROWS, ROWS), weight),
    ]
    assert torch.allclose(torch.stack(losses), torch.stack(expected), rtol=1e-5)


def changed_in_place(model: nn.Module, x: Tensor, change: str) -> list[Tensor]:
    """What a script sees of rows that it changes through one of their shapes."""
    out = model(x)
    flat = out.view(-1)
    if change == "output":
        out[:, 1] = -4
    elif change == "other shape":
        flat[::2] *= 2
    else:
        out[:2].zero_()
    loss = F.mse_loss(flat, torch.ones(flat.shape)) + F.mse_loss(out, torch.zeros(out.shape))
    grad_of_out: tuple[Tensor, ...] = ()
    if change != "other shape":
        out.register_hook(lambda g: 3 * g)
        grad_of_out = torch.autograd.grad(loss, out, retain_graph=True)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [loss.detach(), flat.detach(), *grad_of_out, *grads]


@ranks(2)
def test_what_is_changed_in_place_is_changed_in_each_shape() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(ROWS, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_output, "LARGE", 1)
        for change in ("output", "other shape", "rows"):
            with sharding():
                assert isinstance(model(x), sharded_output.ShardedOutput)
                found = changed_in_place(model, x, change)
            expected = changed_in_place(model, x, change)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)


@ranks(2)
def test_a_rank_reads_by_itself_an_output_that_all_have_gathered() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(ROWS, 4)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(sharded_output, "LARGE", 1)
        with sharding():
            kept, freed_elsewhere = model(x), model(2 * x)
            if instep.rank == 1:
                del freed_elsewhere
            sharded_output.gather_outputs()
            found = kept + 0 if instep.rank == 0 else None
        if found is not None:
            torch.testing.assert_close(found, model(x))


@ranks(2)
def test_a_thread_of_the_script_reads_an_output_while_the_main_thread_goes_on() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(ROWS, 4)
    found: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(sharded_output, "LARGE", 1)
        with sharding():
            first, second = model(x), model(2 * x)
            threads = [
                threading.Thread(target=lambda out=out: found.append(out + 0))
                for out in (first, second)
            ]
            for thread in threads[:: 1 if instep.rank else -1]:  # in no common order
                thread.start()
            third = model(3 * x) + 0
            for thread in threads:
                thread.join()
    assert torch.allclose(third, model(3 * x), atol=1e-6)
    sums = sorted(each.sum().item() for each in found)
    expected = sorted(model(k * x).sum().item() for k in (1, 2))
    assert sums == pytest.approx(expected, rel=1e-4)


class NormedWeightGradient(torch.autograd.Function):
    """A product whose gradient with respect to the weight is divided by its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_weight = grads[0].T @ x
        return grads[0] @ weight, of_weight / of_weight.norm()


class WithNormedGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = NormedWeightGradient.apply(x, self.first.weight)
        return self.last(features)


@ranks(2)
def test_a_weight_that_is_thawed_is_compared_for_its_gradient() -> None:
    model = WithNormedGradient().double()
    x = torch.randn(8, 6).double()

    def gradients(trains: bool) -> list[Tensor]:
        model.zero_grad()
        model.first.weight.requires_grad_(trains)
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    trained = [False] * 5 + [True] * 3
    expected = list(map(gradients, trained))
    with sharding():
        found = list(map(gradients, trained))
    assert modules.call_counts.sharded >= 5
    torch.testing.assert_close(found, expected)


class Thawing(nn.Module):
    """Begins to train its first layer in its sixth call, without a branch."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.first.weight.requires_grad = self.calls > 5
        return self.last(torch.tanh(self.first(x)))


@ranks(2)
def test_a_parameter_that_a_divided_call_begins_to_train_has_the_whole_gradient() -> None:
    model, x = Thawing().double(), torch.randn(8, 6).double()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def training() -> list[list[Tensor]]:
        model.calls = 0
        model.first.requires_grad_(False)
        return [gradients() for _ in range(8)]

    expected = training()
    with sharding():
        found = training()
    assert modules.call_counts.sharded >= 4
    torch.testing.assert_close(found, expected)
