"""Calls whose arguments are others than those of the calls that were compared, so that rows begin
to depend on each other, or on how many there are."""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import instep
from instep.errors import ShardedCallError
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.plan.plan_cache import _plans
from pool import ranks
from sharded_training import With, sharding

pytestmark = pytest.mark.slow

LATE = 5
"""The first call with other arguments; no sample is compared in it or after it."""
CALLS = 8
Function = Callable[..., Any]


class Options:
    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


class Slotted:
    __slots__ = ("mix",)

    def __init__(self, mix: float) -> None:
        self.mix = mix


class Other(nn.Module):
    def __init__(self, mix: float) -> None:
        super().__init__()
        self.mix = mix


def expected_and_found(model: nn.Module, calls: list[tuple[Any, ...]]) -> tuple[Any, Any]:
    """What the model returns for these arguments without instep, and divided."""
    expected = [model(*args) for args in calls]
    with sharding():
        found = [model(*args) for args in calls]
    return expected, found


def assert_same(model: nn.Module, calls: list[tuple[Any, ...]], *, sharded: int = 1) -> None:
    """`sharded`: the least number of calls that are divided."""
    expected, found = expected_and_found(model.double(), calls)
    torch.testing.assert_close(found, expected)
    assert modules.call_counts.sharded >= sharded


def assert_same_whole(model: nn.Module, calls: list[tuple[Any, ...]]) -> None:
    assert_same(model, calls, sharded=0)
    assert modules.call_counts.sharded == 0


def rows(count: int = 8, *, seed: int = 0) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed)).double()


def mixing(x: Tensor, weight: Any) -> Tensor:
    return x + float(weight) * x.mean(0)


VALUES: dict[str, tuple[Function, Any, Any]] = {
    "a tensor": (lambda x, w: x + w * x.mean(0), torch.zeros(()), torch.tensor(0.5)),
    "a tensor with a dimension": (
        lambda x, w: x + w * x.mean(0),
        torch.zeros(1),
        torch.tensor([0.5]),
    ),
    "an object": (lambda x, o: mixing(x, o.mix), Options(mix=0.0), Options(mix=0.5)),
    "an object with slots": (lambda x, o: mixing(x, o.mix), Slotted(0.0), Slotted(0.5)),
    "parsed options": (
        lambda x, o: mixing(x, o.mix),
        argparse.Namespace(mix=0.0, name="a"),
        argparse.Namespace(mix=0.5, name="a"),
    ),
    "a text in an object": (
        lambda x, o: {"plain": x, "mixed": x + x.mean(0)}[o.mode],
        Options(mode="plain"),
        Options(mode="mixed"),
    ),
    "weights in an object": (
        lambda x, o: mixing(x, o.weights["mean"]),
        Options(weights={"mean": 0.0}),
        Options(weights={"mean": 0.5}),
    ),
    "an object in an object": (
        lambda x, o: mixing(x, o.model.mix),
        Options(model=Options(mix=0.0)),
        Options(model=Options(mix=0.5)),
    ),
    "another module": (
        lambda x, other: mixing(x, other.mix),
        Other(0.0),
        Other(0.5),
    ),
    "a tensor of weights": (
        lambda x, weights: weights[0] * x + weights[1] * x.mean(0),
        torch.tensor([1.0, 0.0, 0.0]),
        torch.tensor([1.0, 0.5, 0.0]),
    ),
    "an array of weights": (
        lambda x, weights: weights[0] * x + weights[1] * x.mean(0),
        np.array([1.0, 0.0, 0.0]),
        np.array([1.0, 0.5, 0.0]),
    ),
    "a set": (lambda x, names: mixing(x, "mean" in names), frozenset(), frozenset({"mean"})),
    "a range": (lambda x, places: mixing(x, 1 in places), range(1), range(2)),
    "a slice": (lambda x, part: mixing(x, torch.arange(2)[part].sum()), slice(1), slice(2)),
    "as many weights as rows": (
        lambda x, weights: weights[0] * x + weights[1] * x.mean(0),
        [1.0, *[0.0] * 7],
        [1.0, 0.5, *[0.0] * 6],
    ),
}
"""What a forward does with its argument, and that argument in the first calls and later."""


@pytest.mark.parametrize("kind", VALUES)
@ranks(2)
def test_what_changes_beside_the_rows_is_compared(kind: str) -> None:
    function, first, later = VALUES[kind]
    calls = [(rows(seed=k), first if k < LATE else later) for k in range(CALLS)]
    assert_same(With(function), calls)


class Switched(nn.Module):
    """By its argument, in a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), SwitchedPart()

    def forward(self, x: Tensor, step: int) -> Any:
        return self.last(self.first(x), step=step)


class SwitchedPart(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: Tensor, step: int) -> Any:
        scores = super().forward(x)
        return scores - scores.mean(0) if step > 84 else scores


class PassedOn(nn.Module):
    """As `Switched`, through a method that gives it another name, and once more without one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList([SwitchedPart()])

    def forward(self, x: Tensor, now: int) -> Any:
        return self.run_blocks(self.first(x), time=2 * now)

    def run_blocks(self, x: Tensor, *, time: int) -> Any:
        for block in self.blocks:
            x = block(x, time // 2)
        return x


class Warmed(nn.Linear):
    """With a weight that its argument gives."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: Tensor, step: int) -> Any:
        begins = int(step) - 84
        x = super().forward(x)
        return x + min(1.0, max(0.0, begins / 10)) * x.mean(0)


@pytest.mark.parametrize("tells_by_tensor", [False, True])
@pytest.mark.parametrize("make", [Switched, PassedOn, Warmed])
@ranks(2)
def test_what_a_forward_computes_from_a_step_that_it_is_given_is_compared(
    make: Callable[[], nn.Module], tells_by_tensor: bool
) -> None:
    steps = [torch.tensor(k) if tells_by_tensor else k for k in range(90)]
    calls = [(rows(seed=k), step) for k, step in enumerate(steps)]
    assert_same(make(), calls)


def filled(values: Tensor, is_missing: Tensor) -> Tensor:
    return torch.where(is_missing, values.nanmean(0), values)


def late_values(changed: Callable[[Tensor], Tensor]) -> list[tuple[Tensor]]:
    return [(rows(seed=k) if k < LATE else changed(rows(seed=k)),) for k in range(CALLS)]


def holed(x: Tensor, value: float) -> Tensor:
    x[1, 2] = x[5, 3] = value
    return x


class Imputing(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(6, 3)

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.layer(self.function(x, *others))


@ranks(2)
def test_zeros_for_which_a_forward_takes_the_mean_of_the_batch_are_tried() -> None:
    model = Imputing(lambda x: filled(x, x == 0))
    assert_same_whole(model, late_values(lambda x: holed(x, 0.0)))


@ranks(2)
def test_nan_for_which_a_forward_takes_the_mean_of_the_batch_is_tried() -> None:
    model = Imputing(lambda x: filled(x, x.isnan()))
    assert_same_whole(model, late_values(lambda x: holed(x, torch.nan)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.int64])
@ranks(2)
def test_masks_in_which_nothing_is_set_yet_are_tried(dtype: torch.dtype) -> None:
    empty = torch.zeros(8, 6, dtype=dtype)
    calls = [(rows(seed=k), empty if k < LATE else holed(empty.clone(), 1)) for k in range(CALLS)]
    assert_same_whole(Imputing(lambda x, mask: filled(x, mask.bool())), calls)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
@ranks(2)
def test_lengths_of_which_all_parts_have_the_same_largest_are_tried(dtype: torch.dtype) -> None:
    same = torch.full((8,), 5, dtype=dtype)
    other = torch.tensor([5, 1, 2, 3, 1, 2, 3, 4], dtype=dtype)
    calls = [(rows(seed=k), same if k < LATE else other) for k in range(CALLS)]
    assert_same_whole(Imputing(lambda x, lengths: x / lengths.max()), calls)


def carried(x: Tensor, weight: Any) -> Tensor:
    found = [x[0]]
    for row in x[1:]:
        found.append(row + max(0.0, float(weight) - 0.37) * found[-1])
    return torch.stack(found)


@pytest.mark.parametrize("count", [0, 3])
@ranks(2)
def test_a_number_that_grows_slowly_is_tried_with_other_values(count: int) -> None:
    """No comparison is due between the call in which it makes a difference and the next ones."""
    numbers = [0.3 + 0.01 * k for k in range(14)]
    calls = [
        (rows(seed=k), torch.tensor([number] * count) if count else number)
        for k, number in enumerate(numbers)
    ]
    function = carried if not count else lambda x, weights: carried(x, weights[1])
    assert_same(With(function), calls, sharded=0)


def weighted(x: Tensor, labels: Tensor) -> Tensor:
    counts = torch.bincount(labels, minlength=10)
    return x * torch.where(labels > 4, counts[labels], 1)[:, None]


@ranks(2)
def test_labels_above_the_largest_so_far_are_tried() -> None:
    calls = [(rows(seed=k), torch.arange(8) % (4 if k < LATE else 7)) for k in range(CALLS)]
    assert_same_whole(Imputing(weighted), calls)


def squeezed(x: Tensor) -> Tensor:
    return x[:, :1].squeeze()


def divided(x: Tensor) -> Tensor:
    return x / min(3, len(x))


@pytest.mark.parametrize("function", [squeezed, divided])
@ranks(2)
def test_parts_with_few_rows_are_compared(function: Function) -> None:
    sizes = (9, 11, 10, 8, 7, 6, 5, 7, 3, 2, 4)
    assert_same(With(function), [(rows(n, seed=n),) for n in sizes])


@ranks(2)
def test_rows_that_a_forward_leaves_out_are_an_error_where_all_ranks_leave_out_some() -> None:
    model = Imputing(lambda x: x[x.abs().sum(1) > 0]).double()
    with sharding():
        for k in range(LATE):
            model(rows(seed=k))
        x = rows(seed=LATE)
        x[1] = x[5] = 0
        with pytest.raises(ShardedCallError, match=r"shape \[3, 3\] for 4 rows"):
            model(x)


def repeated(x: Tensor, layer: nn.Linear) -> Tensor:
    """Of a batch of sequences (rows, times, features)."""
    state = x[:, 0]
    for time in range(x.shape[1]):
        weight = F.dropout(layer.weight, 0.5)
        state = state + F.dropout(torch.tanh(F.linear(x[:, time], weight)), 0.1)
    return state


class RowCount:
    rows = 0


row_count = RowCount()
counted: Any = weakref.ref(row_count)
"""Nobody looks behind it for what a forward changes."""


class Recurrent(nn.Module):
    """With noise on its weights, which have twice as many rows as a rank's part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        counted().rows += len(x)
        return repeated(x, self.layer)


@pytest.mark.parametrize("rows_of_batch", [8, 16])
@ranks(2)
def test_draws_that_a_loop_repeats_more_often_are_those_of_the_first_times(
    rows_of_batch: int,
) -> None:
    times = (9, 10, 11, 12, 13, 15, 14)
    calls = [(torch.randn(rows_of_batch, n, 8).double(),) for n in times]
    model = Recurrent().double()
    torch.manual_seed(0)
    expected = [model(*args) for args in calls]
    torch.manual_seed(0)
    with sharding():
        found = [model(*args) for args in calls]
        before = counted().rows
        with torch.random.fork_rng():
            model(torch.randn(rows_of_batch, 15, 8).double())
    torch.testing.assert_close(found, expected)
    # Of 16 rows a rank's part looks like the weights, so that the whole batch is computed.
    assert counted().rows - before == (4 if rows_of_batch == 8 else 8 + 16)


class Counting(nn.Module):
    """Returns a number that it reads from its rows, which is zero as a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.layer(x), int((x > 50).sum())


@ranks(2, 3)
def test_a_number_that_depends_on_the_rows_is_that_of_the_batch_where_nobody_watches() -> None:
    calls = [(rows(seed=k),) for k in range(72)]
    calls[-2][0][[1, 2, 6], 0] = 99
    assert_same(Counting(), calls, sharded=len(calls) - 1)


class CountingFrom(Counting):
    def forward(self, x: Tensor, start: int = 0) -> tuple[Tensor, int]:
        scores, count = super().forward(x)
        return scores, start + count


@ranks(2)
def test_a_number_that_is_another_in_each_call_is_compared_between_the_ranks() -> None:
    calls = [(rows(seed=k), k) for k in range(72)]
    calls[-2][0][[1, 2, 6], 0] = 99
    assert_same(CountingFrom(), calls, sharded=len(calls) - 1)


class CountingCalls(Counting):
    calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        return super().forward(x)


@ranks(2)
def test_a_call_that_cannot_be_made_anew_for_its_number_is_an_error() -> None:
    model = CountingCalls().double()
    with sharding():
        for k in range(70):
            model(rows(seed=k))
        x = rows()
        x[[1, 2, 6], 0] = 99
        with pytest.raises(ShardedCallError, match="begun to return a number"):
            model(x)


@ranks(2)
def test_an_object_that_is_another_on_each_rank_is_compared_by_all_or_none() -> None:
    model = With(lambda x, _: x).double()
    for seconds in (2, 3 + instep.rank):
        calls = [(rows(seed=k), Options(speed=f"{k // seconds} rows/s")) for k in range(40)]
        assert_same(model, calls, sharded=len(calls))


@ranks(2)
def test_the_numbers_of_calls_that_are_no_other_cost_no_comparison() -> None:
    model, x = With(lambda x, *_: x).double(), rows()
    with sharding():
        for _ in range(CALLS):
            model(x, torch.zeros(1), torch.ones(3), [0.5] * 8, Options(mix=0.5), {1, 2})
    [entry] = _plans[model].entries
    assert (entry.last_compared, modules.call_counts.whole) == (1, 0)


class CountsImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.seen = nn.Conv2d(1, 4, 3), 0

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        self.seen += len(images)
        return [self.conv(image[None])[0] for image in images]


@ranks(2)
def test_a_list_of_images_of_one_channel_is_no_small_batch() -> None:
    images = [torch.randn(1, 5 + k % 2, 5) for k in range(6)]
    with sharding() as log:
        model = CountsImages()
        for _ in range(3):  # the first two may set it up
            model(images)
    if instep.rank == 0:
        assert "CountsImages whole: its attribute seen depends on the rows." in log.getvalue()
