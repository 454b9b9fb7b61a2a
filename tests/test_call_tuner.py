"""Calls are sharded where that takes less time, and whole elsewhere: the same on all ranks."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.process.patching import PatchHandle
from instep.training.draws import kernels
from instep.unedited.patch_table import SHARDED_CALL_PATCHES
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.plan import plan_cache, whole_calls
from instep.unedited.sharded_call.plan.call_tuner import (
    FIRST_CALLS,
    CallTuner,
    GainEstimate,
    TimedStep,
    gain,
)
from instep.unedited.sharded_call.plan.module_state import temporary_modules
from instep.unedited.sharded_call.plan.whole_calls import WholeCall
from instep.unedited.sharded_call.plan.whole_reasons import WholeReason
from instep.unedited.sharded_call.run import timed_calls
from instep.unedited.sharded_call.run.region import current_region
from pool import ranks
from sharded_training import mlp

pytestmark = pytest.mark.slow


class Clock:
    """Goes on by what each computation is said to take."""

    def __init__(self, sharded: float, whole: float) -> None:
        self.now, self.costs = 0.0, {True: sharded, False: whole}

    def __call__(self, device: torch.device) -> float:
        return self.now

    def compute(self) -> None:
        self.now += self.costs[current_region() is not None]


class Timing:
    """The clock, and the rows of each call."""

    clock: Clock
    seen: list[int]


timing = Timing()
timed = weakref.ref(timing)
"""Nobody looks behind it for what a forward changes."""


class Timed(nn.Linear):
    """A layer that moves the clock on in its forward, and in its backward."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        timed().clock.compute()
        timed().seen.append(len(input))
        return super().forward(input)


@contextmanager
def tuning(sharded: float, whole: float, divide: str = "auto") -> Iterator[None]:
    """Inside, module calls are sharded where that takes less time by this clock."""
    before, os.environ["INSTEP_DIVIDE"] = os.environ["INSTEP_DIVIDE"], divide
    timed().clock, timed().seen = Clock(sharded, whole), []
    real_clock, timed_calls.clock = timed_calls.clock, timed().clock
    patched = PatchHandle(SHARDED_CALL_PATCHES)
    modules.reset()
    try:
        yield
    finally:
        patched.remove()
        timed_calls.clock = real_clock
        os.environ["INSTEP_DIVIDE"] = before
        modules.reset()


def different_rows(*shape: int) -> torch.Tensor:
    """Of equal ones each call would be compared."""
    return torch.arange(math.prod(shape)).view(shape) / 48


def last_rows(calls: int, model: nn.Module, rows: int, *, backward: bool = True) -> int:
    """How many rows this rank computed in the last of so many calls."""
    for _ in range(calls):
        with torch.set_grad_enabled(backward):
            output = model(different_rows(rows, 4))
        if backward:
            model.zero_grad()
            output.sum().backward()
    return timed().seen[-1]


@ranks(2, 3)
@pytest.mark.parametrize("backward", [True, False])
def test_what_takes_less_time_is_chosen(backward: bool) -> None:
    own = 12 // instep.world_size
    with tuning(sharded=3.0, whole=1.0):
        assert last_rows(12, Timed(4, 3), 12, backward=backward) == 12
    with tuning(sharded=1.0, whole=1.5):
        assert last_rows(12, Timed(4, 3), 12, backward=backward) == own
    with tuning(sharded=1.0, whole=1.0):
        assert last_rows(12, Timed(4, 3), 12, backward=backward) == 12
    with tuning(sharded=3.0, whole=1.0, divide="always"):
        assert last_rows(12, Timed(4, 3), 12, backward=backward) == own


@ranks(2)
def test_the_slowest_rank_counts() -> None:
    """On rank 1 sharding pays, on rank 0 it does not: both take the same."""
    with tuning(sharded=2.0 - instep.rank, whole=1.5):
        assert last_rows(12, Timed(4, 3), 12) == 12
    with tuning(sharded=1.0, whole=0.9 + instep.rank):
        assert last_rows(12, Timed(4, 3), 12) == 6


@ranks(2)
def test_other_shapes_are_timed_anew_and_a_choice_stays() -> None:
    model = Timed(4, 3)
    with tuning(sharded=3.0, whole=1.0):
        assert last_rows(12, model, 12) == 12
        timed().clock.costs = {True: 1.0, False: 3.0}
        assert last_rows(20, model, 12) == 12
        assert last_rows(12, model, 64) == 32
        assert last_rows(1, model, 12) == 12


@ranks(2)
def test_after_a_while_both_are_timed_again() -> None:
    model = Timed(4, 3)
    with tuning(sharded=3.0, whole=1.0):
        assert last_rows(12, model, 12) == 12
        timed().clock.costs = {True: 1.0, False: 3.0}
        assert last_rows(FIRST_CALLS, model, 12) == 6


@ranks(2)
def test_a_chosen_whole_call_communicates_nothing() -> None:
    """Rank 0 makes calls that rank 1 does not make."""
    model = Timed(4, 3)
    with tuning(sharded=3.0, whole=1.0):
        assert last_rows(12, model, 12) == 12
        for _ in range(20 * (1 - instep.rank)):
            model(different_rows(12, 4)).sum().backward()
        whole = modules.call_counts.whole
    instep.barrier()
    assert whole >= 8 + 20 * (1 - instep.rank)


@ranks(2)
def test_the_numbers_are_those_of_one_process_whichever_is_chosen() -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(mlp(), Timed(3, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(14):
            optimizer.zero_grad()
            x = torch.randn(12, 6, generator=torch.Generator().manual_seed(k)).double()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    timed().clock, timed().seen = Clock(1.0, 1.0), []
    expected = train()
    for costs in ((1.0, 3.0), (3.0, 1.0)):
        with tuning(*costs):
            assert all(map(torch.allclose, train(), expected))


class OtherBits(Timed):
    """Whole, it returns other last bits on rank 1."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        output = super().forward(input)
        return output * (1 + 1e-7 * instep.rank) if current_region() is None else output


@ranks(2)
def test_ranks_that_round_differently_would_drift_apart_and_stay_sharded() -> None:
    with tuning(sharded=3.0, whole=1.0):
        assert last_rows(12, OtherBits(4, 3), 12) == 6
        assert last_rows(2 * FIRST_CALLS, OtherBits(4, 3), 12, backward=False) == 6


@ranks(2)
def test_calls_before_one_backward_are_computed_alike() -> None:
    """As in a loop over time: the sums of one backward are of one sort."""
    model = Timed(4, 4)
    with tuning(sharded=3.0, whole=1.0):
        for _ in range(12):
            x = different_rows(12, 4)
            timed().seen.clear()
            for _ in range(5):
                x = model(x.detach()) + x
            x.sum().backward()
        assert timed().seen == [12] * 5


@pytest.mark.parametrize(
    ("whole", "sharded", "chosen", "most"),
    [
        (lambda k: 1.0, lambda k: 0.96, False, 6),  # too little is gained
        (lambda k: 1.0, lambda k: 0.9, True, 6),
        (lambda k: 1.0 + 9.0 * (k == 0), lambda k: 1.3, False, 6),  # one late step says nothing
        (lambda k: 1.0, lambda k: 0.6 + 9.0 * (k == 1), True, 6),
        (lambda k: 1.0 - 0.2 * (k < 2), lambda k: 0.82, True, 14),  # two early ones neither
        (lambda k: 1.0, lambda k: 1.02 - 0.2 * (k < 2), False, 14),
    ],
)
def test_a_choice_needs_a_margin_and_survives_a_late_step(
    whole: Callable[[int], float], sharded: Callable[[int], float], chosen: bool, most: int
) -> None:
    tuner, steps = CallTuner(), {True: 0, False: 0}
    while not tuner.is_decided:
        is_sharded = tuner.next_is_sharded()
        cost = (sharded if is_sharded else whole)(steps[is_sharded])
        tuner.add(cost, sharded=is_sharded, same_bits=None if is_sharded else True)
        steps[is_sharded] += 1
    assert tuner.is_sharded is chosen
    assert sum(steps.values()) <= most


@ranks(2)
def test_calls_of_one_row_are_looked_up() -> None:
    """A rollout of one environment: after the first call, no plan is looked for."""
    model = Timed(4, 3)
    with tuning(sharded=3.0, whole=1.0):
        last_rows(1, model, 1, backward=False)
        (entry,) = plan_cache._plans[model].entries
        last_rows(50, model, 1, backward=False)
        assert entry.calls == 2
        assert modules.call_counts.whole == 51


def test_one_line_estimates_what_was_gained() -> None:
    def tuner(sharded: float, whole: float, calls: int) -> CallTuner:
        made = CallTuner()
        while not made.is_decided:
            by = made.next_is_sharded()
            made.add(sharded if by else whole, sharded=by, same_bits=None if by else True)
        for _ in range(calls):
            made.count(1, sharded=made.is_sharded)
        return made

    unused = CallTuner()
    assert GainEstimate([unused]).format(2, 100.0) == ""
    tuners = [unused, tuner(1.0, 2.0, 80), tuner(5.0, 1.0, 10)]
    estimate = GainEstimate(tuners)
    expected = (
        "2 ranks: about 1.8 times as fast as one (estimated from calls timed both ways); 80 % of "
        "the time in divided calls; 10 % of the time in calls that every rank computes whole; the "
        "rest elsewhere."
    )
    assert estimate.format(2, 100.0) == expected
    gone = weakref.ref(tuners.pop())
    assert gone() is None
    assert estimate.format(2, 100.0) == expected
    slow = tuner(5.0, 1.0, 90)
    assert GainEstimate([slow]).format(3, 100.0) == (
        "3 ranks: about as fast as one (estimated from calls timed both ways); 90 % of the time in "
        "calls that every rank computes whole; the rest elsewhere."
    )


@ranks(2)
def test_of_a_whole_call_the_parts_are_looked_at_until_all_are_known() -> None:
    """Here the parts have one row, too; further down, the outermost call's parts have many."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(Timed(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x[0] if x.dim() == 3 else x)

    model = Folded()
    with tuning(sharded=1.0, whole=3.0):
        last_rows(4, model, 1, backward=False)
        (entry,) = plan_cache._plans[model.body].entries
        for _ in range(20):
            model(torch.ones(1, 4, requires_grad=False))
        assert entry.calls <= 3
        for _ in range(20):
            model(different_rows(1, 12, 4)).sum().backward()
        assert timed().seen[-1] == 6


class Joined(nn.Module):
    """Cannot be sharded but for its layer, whose rows it then has to join."""

    def __init__(self, joining: float) -> None:
        super().__init__()
        self.body, self.joining = nn.Sequential(Timed(4, 3)), joining

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        if timed().seen[-1] < len(x):
            timed().clock.now += self.joining
        return y * torch.arange(len(y)).unsqueeze(1)


@pytest.mark.parametrize("backward", [True, False])
@ranks(2)
def test_the_parts_of_a_whole_call_are_sharded_where_all_of_it_takes_less_time(
    backward: bool,
) -> None:
    with tuning(sharded=1.0, whole=1.5):
        assert last_rows(30, Joined(0.1), 12, backward=backward) == 6
        costly = Joined(2.0)
        assert last_rows(30, costly, 12, backward=backward) == 12
        costly.joining = 0.0
        assert last_rows(FIRST_CALLS, costly, 12, backward=backward) == 6


def test_a_step_that_no_backward_reaches_does_not_wait_for_ever() -> None:
    step = TimedStep(is_sharded=False, compares_bits=False)
    timed_calls.reset()
    timed_calls._backwards.waiting[step] = weakref.ref(nn.Linear(1, 1))
    try:
        for missed in range(timed_calls._MAX_MISSED):
            assert (step.is_complete, step.missed) == (False, missed)
            timed_calls.end_backward(timed_calls.start_backward())
        assert step.is_complete
        assert timed_calls.start_backward() is None
    finally:
        timed_calls.reset()


@pytest.mark.parametrize(
    ("calls", "sharded", "rows"),
    [
        (18, 0.8, 6),
        (18, 1.2, 12),
        (23, 0.8, 6),
        pytest.param(23, 1.2, 12, marks=pytest.mark.nightly),
        pytest.param(40, 0.8, 6, marks=pytest.mark.nightly),
        pytest.param(40, 1.2, 12, marks=pytest.mark.nightly),
    ],
)
@ranks(2)
def test_of_many_calls_before_a_backward_the_first_ones_are_compared(
    calls: int, sharded: float, rows: int
) -> None:
    """As of a cell, or of what an ODE's solver calls: the time of a backward is that of all."""
    model = Timed(4, 3)

    def takes_long(grad: Tensor) -> None:
        timed().clock.now += 50.0

    with tuning(sharded=sharded, whole=1.0):
        for _ in range(12):
            total = torch.zeros(12, 3, requires_grad=True) + 0
            total.register_hook(takes_long)
            for _ in range(calls):
                total = total + model(different_rows(12, 4))
            total.sum().backward()
        assert timed().seen[-1] == rows


@ranks(2)
def test_calls_that_no_backward_ever_reaches_are_compared_as_well() -> None:
    model = Timed(4, 3)
    with tuning(sharded=1.0, whole=3.0):
        for _ in range(6 * (timed_calls.MAX_CALLS + timed_calls._MAX_SKIPPED)):
            model(different_rows(12, 4))
        assert timed().seen[-1] == 6


@ranks(2)
def test_torch_has_its_kernels_back_when_all_calls_are_whole() -> None:
    """Those that draw, which stand in for a divided call's."""
    model = nn.Sequential(Timed(4, 3), nn.Dropout(0.5))
    with tuning(sharded=3.0, whole=1.0), pytest.MonkeyPatch.context() as patch:
        assert last_rows(12, model, 12) == 12
        assert kernels._replaced.library
        patch.setattr(modules, "_IDLE_CALLS", 4)
        assert last_rows(8, model, 12) == 12
        assert not kernels._replaced.library


class Mode(Enum):
    ONE, OTHER = range(2)


def test_a_whole_call_is_found_by_its_flags() -> None:
    layer, x = nn.Linear(1, 1), torch.ones(2, 1)
    known = WholeCall(rows=2, elements=2, tuner=None, by_parts=False, is_on_accelerator=False)
    whole_calls.add(layer, (x,), {"mode": Mode.ONE, "name": "a"}, known)
    assert whole_calls.find(layer, (x + 1,), {"mode": Mode.ONE, "name": "a"}) is known
    assert whole_calls.find(layer, (x,), {"mode": Mode.OTHER, "name": "a"}) is None
    assert whole_calls.find(layer, (x,), {"mode": Mode.ONE, "name": "b"}) is None


def test_modules_that_are_made_anew_share_what_is_known_of_their_calls() -> None:
    layer, x = nn.Linear(1, 1), torch.ones(2, 1)
    known = WholeCall(rows=2, elements=2, tuner=None, by_parts=False, is_on_accelerator=False)
    for _ in range(temporary_modules._WRAPPERS + 1):
        wrapper = nn.Sequential(layer)
        assert whole_calls.find(wrapper, (x,), {}) is None
        temporary_modules.find_reason(wrapper)
    first, second, other = (
        nn.Sequential(layer),
        nn.Sequential(layer),
        nn.Sequential(nn.Linear(1, 1)),
    )
    assert whole_calls.find(first, (x,), {}) is None
    whole_calls.add(first, (x,), {}, known)
    assert whole_calls.find(second, (x,), {}) is known
    assert whole_calls.find(second, (x.double(),), {}) is None
    assert whole_calls.find(other, (x,), {}) is None


def test_copies_that_are_not_compared_any_more_share_what_is_known_of_their_calls() -> None:
    x = torch.ones(2, 1)
    known = WholeCall(rows=2, elements=2, tuner=None, by_parts=False, is_on_accelerator=False)
    for _ in range(temporary_modules._COPIES):
        copy = nn.Bilinear(1, 1, 7)
        assert whole_calls.find(copy, (x, x), {}) is None
        temporary_modules.note(copy, WholeReason("it prints in its forward"))
    first, second, wider = nn.Bilinear(1, 1, 7), nn.Bilinear(1, 1, 7), nn.Bilinear(1, 1, 8)
    assert whole_calls.find(first, (x, x), {}) is None
    whole_calls.add(first, (x, x), {}, known)
    assert whole_calls.find(second, (x, x), {}) is known
    assert whole_calls.find(wider, (x, x), {}) is None
    temporary_modules.note(nn.Bilinear(1, 1, 7), None)  # one of them is divided after all
    assert whole_calls.find(nn.Bilinear(1, 1, 7), (x, x), {}) is None


class OtherGradientBits(Timed):
    """Computed whole, its outputs have the same bits on all ranks, but not its gradients."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        output = super().forward(input)
        if current_region() is None and output.requires_grad:
            (output,) = _OtherBits.apply(output)  # type: ignore[no-untyped-call]
        return output


class _OtherBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> tuple[Tensor]:
        return (output.clone(),)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (1 + 1e-6 * instep.rank)


@ranks(2)
def test_ranks_whose_gradients_round_differently_stay_sharded() -> None:
    with tuning(sharded=3.0, whole=1.0):
        assert last_rows(12, OtherGradientBits(4, 3), 12) == 6


@ranks(2)
def test_calls_that_are_chosen_to_be_whole_are_counted_as_whole() -> None:
    model = Timed(4, 3)
    with tuning(sharded=3.0, whole=1.0):
        last_rows(2, model, 12, backward=False)
        (tuner,) = gain._tuners
        before = {**tuner.elements}
        timed().seen.clear()
        last_rows(30, model, 12, backward=False)
        sharded, whole = (48 * timed().seen.count(rows) for rows in (6, 12))
        assert tuner.elements == {True: before[True] + sharded, False: before[False] + whole}
