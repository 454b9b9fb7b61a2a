"""Forwards whose control flow is another than in the calls that were compared: by the script's own
state, or by what is in their rows."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import multiprocessing
import queue
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import instep
from instep.unedited.errors import ShardedCallError
from instep.unedited.objects.branch_conditions import BranchConditions
from instep.unedited.objects.evaluation import Evaluation, NoValueError, Values
from instep.unedited.objects.namespaces import Counters
from instep.unedited.sharded_call import modules
from instep.unedited.sharded_call.plan.control_flow import ControlFlow, NewBranch
from oracle import Log, same_as_one_process
from pool import ranks
from sharded_training import Around, batches, sharding, train, unedited

pytestmark = pytest.mark.slow

LATE = 6
"""The call in which something begins; no sample is compared in it."""
STEPS = 14


class CentresAfterAWhile(Around):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        scores = self.body(x)
        return scores - scores.mean(0) if self.steps > LATE else scores


class CentresEverySixthBatch(Around):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scores = self.body(x)
        if self.calls % LATE == 0:
            scores = scores - scores.mean(0)
        return scores


class CentresLargeBatches(Around):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.body(x)
        return scores - scores.mean(0) if x.abs().mean() > 1.5 else scores


class RepeatsUntilItIsSmall(Around):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 20.0:
            x = x / 2
        return self.body(x)


class SolvesUpToATolerance(Around):
    """Of most batches all rows need the same steps; of one those of the second rank need more."""

    def forward(self, x: Tensor) -> Tensor:
        goal = self.body(x)
        found, error = torch.zeros_like(goal), 1.0
        while error > 0.01:
            found = found + 0.5 * (goal - found)
            error = (goal - found).abs().max().item() / 10
        return found


class FollowsTheLongest(Around):
    def forward(self, x: Tensor) -> Tensor:
        longest = int((x.abs() < 6).sum(1).max())
        return torch.cat([self.body(x)] * longest, 1)[:, : 3 * longest]


class LossOfTheConfident(Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.body(x)
        loss = F.cross_entropy(scores, y)
        confident = x[:, 0] > 9
        if confident.any():
            loss = loss + F.cross_entropy(scores[confident], y[confident])
        return loss


class DoublesPositiveBatches(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (2 if x[:, 0].mean() > 0 else 1)


class RefusesLargeBatches(Around):
    """A branch that makes no difference to what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1e6:
            raise ValueError("too large")
        if x.isnan().any():
            print("not a number")
        scores: Tensor = self.body(x)
        return scores


class CentresWithManyOfAKind(Around):
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        chosen = (x[:, 0] > 50).nonzero()[:, 0]
        if len(chosen) > 8:
            scores = scores - scores.mean(0)
        return scores


class CentresRareBatches(Around):
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        is_rare = bool((x > 50).any())
        return scores - scores.mean(0) if is_rare else scores


class CallsExperts(Around):
    """With their rows, if they have any."""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        is_chosen = x[:, 1] > 0
        if is_chosen.any():
            found = self.body(x[is_chosen])
            scores = scores.index_add(0, is_chosen.nonzero()[:, 0], found)
        for sign in (-1, 1):
            rows = (x[:, 0].sign() == sign).nonzero()[:, 0]
            if rows.numel() == 0:
                continue
            scores = scores.index_add(0, rows, self.body(x[rows]))
        return scores.index_add(0, rows, self.body(x[rows])) if len(rows) > 0 else scores


class CentresBatchesWithExperts(Around):
    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        is_chosen = x[:, 1] > 50
        if is_chosen.any():
            scores = scores - scores.mean(0)
        return scores


@ranks(2)
def test_a_branch_by_a_value_of_all_rows_is_that_of_the_whole_batch() -> None:
    whole = (CentresWithManyOfAKind, CentresRareBatches, CentresBatchesWithExperts)
    for kind in (*whole, RefusesLargeBatches, CallsExperts):
        with sharding():
            for x, _ in batches(2):
                kind().double()(x)
            is_divided = kind not in whole
            assert modules.call_counts.sharded == (2 if is_divided else 0)


def of_signs(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """All rows have one sign, each of which is compared, and those of the two ranks then differ."""
    calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        x[:, 0] = -1.0 if calls % 2 else 1.0
        if calls == LATE:
            x[len(x) // 2 :, 0] = -3.0
        return F.cross_entropy(model(x), y)

    return step


def of_halves(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Each batch has equal rows but for signs; the halves of one have other sizes."""
    calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        x = x[:1].expand_as(x) * torch.ones(len(x), 1).cumsum(0).div(100).add(1)
        if calls == LATE:
            x = torch.cat([x[: len(x) // 2] * 0.01, x[len(x) // 2 :] * 10])
        return F.cross_entropy(model(x), y)

    return step


def of_scores(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == LATE:
            x = x * 10
        scores: Tensor = model(x)
        return F.cross_entropy(scores, y) if scores.shape[1] == 3 else scores.square().mean()

    return step


def of_loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x[0, 0] = 0.0 if step.calls != LATE else 10.0  # type: ignore[attr-defined]
        step.calls += 1  # type: ignore[attr-defined]
        loss: Tensor = model(x, y)
        return loss

    step.calls = 0  # type: ignore[attr-defined]
    return step


def training(log: Log, model: type[nn.Module], loss: Callable[..., Any]) -> None:
    made = model()
    train(log, made, loss(made), steps=STEPS)


def play(log: Log, *args: Any) -> None:
    unedited(log, lambda log: training(log, *args), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        pytest.param(CentresAfterAWhile, of_scores, marks=pytest.mark.nightly),
        pytest.param(CentresEverySixthBatch, of_scores, marks=pytest.mark.nightly),
        (CentresLargeBatches, of_scores),
        (RepeatsUntilItIsSmall, of_scores),
        (SolvesUpToATolerance, of_halves),
        (FollowsTheLongest, of_scores),
        pytest.param(LossOfTheConfident, of_loss, marks=pytest.mark.nightly),
        (DoublesPositiveBatches, of_signs),
    ],
)
def test_a_call_with_another_control_flow_is_compared(
    model: type[nn.Module], loss: Callable[..., Any]
) -> None:
    sizes = (3,) if model is CentresAfterAWhile else (2,)
    same_as_one_process(play, model, loss, sizes=sizes, dtype=torch.float64, nudge=True)


class RefusesSomeRows(Around):
    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return self.body(x)


@ranks(2)
def test_an_error_for_the_rows_of_one_rank_is_that_of_the_whole_batch() -> None:
    model, caught = RefusesSomeRows().double(), []
    with sharding() as log:
        for k, (x, y) in enumerate(batches(STEPS)):
            if k == LATE:
                x[-1, 0] = torch.nan
            try:
                F.cross_entropy(model(x), y).backward()
            except ValueError as error:
                caught.append((k, str(error)))
        assert caught == [(LATE, "not a number")]
        assert modules.call_counts.sharded > LATE
        assert "RefusesSomeRows whole" not in log.getvalue()


class RefusesLongRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(())
        if x.shape[1] > LATE:
            raise ValueError(f"{len(x)} rows, {float(noise)}")
        return super().forward(x) + noise


@ranks(2)
def test_an_error_for_the_rows_of_all_ranks_tells_of_the_whole_batch() -> None:
    def try_all() -> list[str]:
        torch.manual_seed(0)
        model, errors = RefusesLongRows(4, 3), []
        for length in range(1, STEPS):
            try:
                model(torch.randn(8, length, 4))
            except ValueError as error:
                errors.append(str(error))
        return errors

    expected = try_all()
    with sharding():
        found = try_all()
        assert modules.call_counts.sharded >= LATE
    assert found == expected != []


class Prints(Around):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == LATE:
            print(len(x), "rows")
        return self.body(x)


@ranks(2)
def test_what_it_prints_for_the_first_time_is_of_the_whole_batch() -> None:
    model = Prints().double()
    with sharding(), contextlib.redirect_stdout(io.StringIO()) as printed:
        for x, y in batches(STEPS):
            F.cross_entropy(model(x), y).backward()
    assert printed.getvalue() == "13 rows\n"


Begun = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]
"""What a forward does with its scores from the call LATE on, and what is left of it in the end."""


def takes_the_next_of(values: Iterator[int]) -> Begun:
    return (lambda scores: scores * next(values)), (lambda: next(values))


def counts() -> Iterator[int]:
    count = 1
    while True:
        count += 1
        yield count


def fills_a_queue() -> Begun:
    entries: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put(scores: Tensor) -> Tensor:
        entries.put(len(scores))
        return scores

    return put, lambda: [entries.get() for _ in range(entries.qsize())]


def empties_a_queue() -> Begun:
    entries: queue.SimpleQueue[int] = queue.SimpleQueue()
    for k in range(1, 3 * STEPS):
        entries.put(k)
    return (lambda scores: scores * entries.get()), entries.get


def writes_to_an_open_file() -> Begun:
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def write(scores: Tensor) -> Tensor:
        file.write(f"{len(scores)} ")
        return scores

    def read() -> str:
        file.seek(0)
        with file:
            return file.read()

    return write, read


def draws() -> Begun:
    source = random.Random(1)
    return (lambda scores: scores * source.random()), source.random


def differentiates() -> Begun:
    def backward(scores: Tensor) -> Tensor:
        scores.square().mean().backward(retain_graph=True)
        return scores

    return backward, lambda: None


BEGUN: dict[str, Callable[[], Begun]] = {
    "iterator": lambda: takes_the_next_of(iter(range(1, 99))),
    "generator": lambda: takes_the_next_of(counts()),
    "put": fills_a_queue,
    "get": empties_a_queue,
    "file": writes_to_an_open_file,
    "random": draws,
    "backward": differentiates,
}


class BeginsLater(Around):
    calls = 0

    def __init__(self, begun: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.begun = begun

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scores: Tensor = self.body(x)
        if self.calls >= LATE:
            scores = self.begun(scores)
        return scores


@ranks(2)
@pytest.mark.parametrize("kind", BEGUN)
def test_what_a_later_call_begins_to_do_is_done_once(kind: str) -> None:
    def learn() -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        begun, left = BEGUN[kind]()
        model = BeginsLater(begun).double()
        for x, y in batches(STEPS):
            F.cross_entropy(model(x), y).backward()
        return [p.grad for p in model.parameters() if p.grad is not None], left()

    expected = learn()
    with sharding():
        found = learn()
        assert modules.call_counts.sharded >= LATE - 3
    assert found[1] == expected[1]
    for own, of_one in zip(found[0], expected[0], strict=True):
        assert torch.allclose(own, of_one, rtol=1e-12)


class QueuesLargeBatches(Around):
    def __init__(self) -> None:
        super().__init__()
        self.queue: queue.SimpleQueue[int] = queue.SimpleQueue()

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 9:
            self.queue.put(len(x))
        scores: Tensor = self.body(x)
        return scores


@ranks(2)
def test_arguments_that_are_tried_begin_nothing() -> None:
    model = QueuesLargeBatches().double()
    with sharding():
        for x, y in batches(3):
            F.cross_entropy(model(x), y).backward()
    assert model.queue.empty()


class DrawsByItsRows(Around):
    def forward(self, x: Tensor) -> Tensor:
        draws = [random.random() for _ in range(1 + (x[:, 0].numpy()[0] > 9))]
        return self.body(x) * (1 + draws[0])


@ranks(2)
def test_ranks_that_draw_otherwise_in_a_call_that_nobody_watches_are_an_error() -> None:
    model, caught = DrawsByItsRows().double(), None
    random.seed(0)
    with sharding():
        for k, (x, y) in enumerate(batches(66)):
            x[0, 0] = 10 if k == 65 else 0
            try:
                F.cross_entropy(model(x), y).backward()
            except ShardedCallError as error:
                caught = k, str(error)
        assert modules.call_counts.whole == 0
    assert caught is not None
    assert caught[0] == 65
    assert "random numbers for some of its rows" in caught[1]


class ReturnsMoreAfterAWhile(Around):
    calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        scores = self.body(x)
        return {"scores": scores} if self.calls < LATE else {"scores": scores, "more": scores}


@ranks(2)
def test_a_call_that_returns_more_than_those_before_is_computed_whole() -> None:
    model = ReturnsMoreAfterAWhile().double()
    with sharding() as log:
        for x, y in batches(STEPS):
            sum(F.cross_entropy(scores, y) for scores in model(x).values()).backward()
        assert modules.call_counts.sharded >= LATE - 1
        assert ("whole: it returns something else than" in log.getvalue()) == (instep.rank == 0)


class WritesIntoItsBatch(Around):
    def forward(self, batch: dict[str, Tensor], is_late: Tensor) -> dict[str, Tensor]:
        if is_late.any():
            batch["x"] = batch["x"] - batch["x"].mean(0)
        batch["x"] = batch["x"] * 2
        batch["scores"] = self.body(batch["x"])
        return batch


@ranks(2)
def test_a_dict_is_as_it_was_when_a_call_is_made_anew() -> None:
    model = WritesIntoItsBatch().double()
    with sharding():
        for k, (x, _) in enumerate(batches(STEPS)):
            is_late = torch.full((len(x), 1), k == LATE)
            batch = model({"x": x}, is_late)
            expected = 2 * (x - x.mean(0) if k == LATE else x)
            torch.testing.assert_close(batch["x"], expected)
            torch.testing.assert_close(batch["scores"], model.body(expected))
            assert modules.call_counts.sharded > 0


class CentresWhere(nn.Module):
    """Some elements are centred, which those of the first batches are not."""

    def __init__(self, centres: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.centres = nn.Linear(4, 3), centres

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        centred = self.body(x) - self.body(x).amax()
        return torch.where(self.centres(x, mask)[..., :1], centred, self.body(x))


def refuses_negative(x: Tensor, mask: Tensor) -> Tensor:
    if x.min() < 0:
        raise ValueError("x must not be negative")
    return x > 4


CONDITIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "large": (lambda x, mask: x > 4, True),
    "NaN for what is negative": (lambda x, mask: x.log() > 1.4, True),
    "refuses negative": (refuses_negative, True),
    "masked": (lambda x, mask: mask == 0, True),
    "never": (lambda x, mask: (x > 4) & (x < 0), False),
    "another branch": (lambda x, mask: x > (99 if x.abs().sum() < 199 else x.amax() - 1), False),
}


@pytest.mark.parametrize("condition", CONDITIONS)
@ranks(2)
def test_a_condition_that_no_row_of_the_first_batches_meets(condition: str) -> None:
    torch.manual_seed(0)
    centres, is_whole = CONDITIONS[condition]
    model, x, mask = CentresWhere(centres), torch.rand(8, 5, 4) + 0.5, torch.ones(8, 5, 1).int()
    state = torch.get_rng_state()
    with sharding() as log:
        found = model(x, mask)
    why = "computes CentresWhere whole: its rows depend on each other where their values are others"
    assert (why in log.getvalue()) == (is_whole and instep.rank == 0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(found, model.body(x))


class DropsLargeRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] < 3])


@ranks(2)
def test_a_call_that_may_drop_rows_later_is_whole_from_the_first_on() -> None:
    torch.manual_seed(0)
    model, x = DropsLargeRows(4, 3), torch.rand(8, 4)
    with sharding() as log:
        for k in range(LATE):
            x[k, 0] = 9.0 if k > 1 else 1.0
            torch.testing.assert_close(model(x), F.linear(x[x[:, 0] < 3], model.weight, model.bias))
    why = "DropsLargeRows whole: the shape of what it returns depends on the values in its rows"
    assert (why in log.getvalue()) == (instep.rank == 0)


class PullsEqualLabels(nn.Linear):
    """Rows of one label, of which the first batches have one each, are drawn to their sum."""

    def forward(self, x: Tensor, labels: Any) -> Tensor:
        has_tensors = isinstance(labels, list) and isinstance(labels[0], Tensor)
        y = torch.stack(labels) if has_tensors else torch.as_tensor(labels)
        scores = super().forward(x)
        others = (y[:, None] == y).float().fill_diagonal_(0)
        return scores - others @ scores / 10


def assert_is_whole_at_once(model: nn.Linear, of_rows: Any) -> None:
    """The first call, with these labels or marks, in which nothing pulls the rows."""
    x = torch.randn(8, 4)
    with sharding() as log:
        found = model(x, of_rows)
    why = "its rows depend on each other where their values are others"
    assert (why in log.getvalue()) == (instep.rank == 0)
    torch.testing.assert_close(found, F.linear(x, model.weight, model.bias))


LABELS: dict[str, Callable[[Tensor], Any]] = {
    "vector": lambda labels: labels,
    "array": lambda labels: labels.numpy(),
    "numbers": lambda labels: labels.tolist(),
    "list": list,
}


@pytest.mark.parametrize("kind", LABELS)
@ranks(2)
def test_rows_that_depend_on_those_of_their_label_are_whole_from_the_first_on(kind: str) -> None:
    torch.manual_seed(0)
    model = PullsEqualLabels(4, 3)
    assert_is_whole_at_once(model, LABELS[kind](torch.arange(8)))


class PullsMarked(nn.Linear):
    """Rows with a mark, which none of the first batches has, are drawn to their sum."""

    def __init__(self, mark: int) -> None:
        super().__init__(4, 3)
        self.mark = mark

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:  # type: ignore[override]
        scores = super().forward(x)
        marked = (marks.view(-1) == self.mark).float()
        return scores - marked[:, None] * (marked @ scores) / 10


@pytest.mark.parametrize(
    ("marks", "mark"),
    [
        (torch.full((8,), -1), 0),  # no row has a group yet
        (torch.tensor([0, 4, 1, 3, 4, 4, 0, 0]), 2),  # a rare label
        (torch.zeros(8, 1).bool(), 1),
        (torch.zeros(8), 1),  # a weight
    ],
)
@ranks(2)
def test_rows_with_a_mark_that_none_has_yet_are_whole_from_the_first_on(
    marks: Tensor, mark: int
) -> None:
    torch.manual_seed(0)
    model = PullsMarked(mark)
    assert_is_whole_at_once(model, marks)


class ClassLoss(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x), labels, label_smoothing=0.1)


@ranks(2)
def test_labels_do_not_keep_a_loss_whole() -> None:
    torch.manual_seed(0)
    model = ClassLoss(4, 3)
    with sharding() as log:
        model(torch.randn(8, 4), torch.arange(8) % 3)
    assert (modules.call_counts.sharded, log.getvalue()) == (1, "")


def always(x: Tensor) -> Tensor:
    if x.ndim > 7:
        raise ValueError("too many dimensions")
    return x + 1  # fmt: skip


def sometimes(x: Tensor, is_on: bool) -> Tensor:
    if is_on:
        x = x + 1
    return x


def in_one_line(x: Tensor, is_on: bool) -> Tensor:
    return x + 1 if is_on else x


def reads(x: Tensor, is_on: bool) -> Tensor:
    return x.sum() if bool(x[0]) == is_on else x.mean()


def strongest(x: Tensor) -> Any:
    return x.detach().cpu().numpy(), x.argmax(0, keepdim=True).numpy(force=True)


def trace_begins_late(function: FunctionType) -> bool:
    """Whether a first trace of this function sees only in which lines it is."""
    return sys.version_info >= (3, 12) and function is in_one_line


@pytest.mark.parametrize("function", [sometimes, in_one_line])
def test_a_branch_is_new_until_a_call_with_it_was_compared(function: FunctionType) -> None:
    flow, x = ControlFlow(), torch.ones(3)
    for is_new in (True, trace_begins_late(function)):
        with flow.traced() as trace:
            function(x, False)
        assert trace.is_new == is_new
        trace.learn()
    assert flow.may_branch()
    for is_on, is_new in [(False, False), (True, True)]:
        with flow.traced() as trace:
            function(x, is_on)
        assert trace.is_new == is_new
    trace.learn()
    assert not flow.may_branch()


@pytest.mark.parametrize("function", [sometimes, in_one_line])
def test_a_function_that_no_compared_call_has_called_is_new(function: FunctionType) -> None:
    flow, x = ControlFlow(), torch.ones(3)
    with flow.traced() as trace:
        always(x)
    trace.learn()
    with flow.traced() as trace:
        function(x, True)
    assert trace.is_new


def test_what_it_reads_from_a_tensor_is_new_until_a_call_with_it_was_compared() -> None:
    flow = ControlFlow()
    with flow.traced() as trace:  # its branches
        reads(torch.ones(3), True)
        reads(torch.ones(3), True)
        reads(torch.ones(3), False)
    trace.learn()
    for x, is_new in [(0.0, True), (0.0, False), (1.0, True), (0.0, False), (1.0, False)]:
        with flow.traced() as trace:
            reads(torch.full((3,), x), True)
            reads(torch.full((3,), x), False)
        assert trace.is_new == is_new
        trace.learn()
    assert flow.may_branch()


def test_whole_numbers_of_an_array_are_read_and_fractions_are_not() -> None:
    flow = ControlFlow()
    whole = [([1, 2], True), ([1, 2], False), ([2, 1], True)]
    for x, is_new in [*whole, ([1.5, 2.5], True), ([2.5, 3.5], False), ([2.5, 1.5], True)]:
        with flow.traced() as trace:
            strongest(torch.tensor(x))
        assert trace.is_new == is_new
        trace.learn()


def test_lines_that_raise_are_no_branch() -> None:
    flow = ControlFlow()
    with flow.traced() as trace:
        always(torch.ones(3))
    trace.learn()
    assert not flow.may_branch()


class HasAStaticMethod(nn.Module):
    """Whose first argument is no module, and has attributes that no module has."""

    @staticmethod
    def flatten(x: Tensor) -> Tensor:
        return x.flatten(1) if x.ndim > 2 else x

    def forward(self, x: Tensor) -> Tensor:
        return self.flatten(x)


def test_a_condition_of_a_static_method_is_none_of_its_module() -> None:
    assert not BranchConditions([HasAStaticMethod()]).may_be_others()


class HasAProperty(nn.Module):
    """Its `step` is a property, though its table has an entry of that name, too."""

    asked = 0

    @property
    def step(self) -> int:
        self.asked += 1
        return self.asked

    @step.setter
    def step(self, value: int) -> None:
        vars(self)["step"] = value

    def forward(self, x: Tensor) -> Tensor:
        return x if self.step < 3 else -x


def test_a_condition_with_a_property_is_not_evaluated() -> None:
    model = HasAProperty()
    model.step = 1
    assert not BranchConditions([model]).may_be_others()
    assert not model.asked


class HasTwoConditions(nn.Module):
    steps, epoch = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.epoch > 3:
            return x
        return x if self.steps > 100 else -x


def test_of_many_calls_only_conditions_are_looked_at_whose_values_have_changed() -> None:
    model = HasTwoConditions()
    model.steps = model.epoch = 0
    conditions = BranchConditions([model])
    for _ in range(64):
        conditions.may_be_others()
        model.steps += 1
    model.epoch = 9
    assert not conditions.may_be_others()
    found = []
    for _ in range(50):
        model.steps += 1
        found.append(conditions.may_be_others())
    assert found.count(True) == 1


def evaluated(text: str, values: Values | None = None, **own: Any) -> Any:
    scope = Evaluation(always, values or Values({}), own, {})
    return scope.value(ast.parse(text, mode="eval").body)


def test_what_python_does_not_evaluate_is_not_evaluated() -> None:
    assert evaluated("zero and 1 / zero", zero=0) == 0
    assert evaluated("two or 1 / 0", two=2) == 2
    assert evaluated("two and zero or two", zero=0, two=2) == 2


def test_powers_of_many_digits_are_not_computed() -> None:
    assert evaluated("2 ** k", k=10) == 1024
    for text in ("2 ** k", "k ** 2"):
        with pytest.raises(NoValueError):
            evaluated(text, k=10**7)


def test_numbers_that_may_go_on_are_no_truth_values() -> None:
    values, part = Values({}), nn.Module()
    part.step, part.ready = 3, True
    assert evaluated("part.step if part.ready else 0", values, part=part) == 3
    assert [name for _, name in values.places] == ["step"]


def test_a_change_of_a_counter_is_told_once() -> None:
    count = torch.tensor(0)
    counters = Counters([count, torch.ones(2), None])
    count += 1
    assert [len(counters.find_changes()) for _ in range(2)] == [1, 0]


def test_code_that_cannot_be_hashed_is_not_followed() -> None:
    """torch.compile makes some, with an object of the graph among its constants."""
    code = sometimes.__code__
    made = code.replace(co_consts=(*code.co_consts, {}))
    flow, x = ControlFlow(), torch.ones(3)
    with flow.traced() as trace:
        found = FunctionType(made, globals())(x, True)
    assert torch.equal(found, x + 1)
    trace.learn()
    assert not flow.may_branch()


def repeats(x: Tensor, times: int) -> Tensor:
    return x + sum([each + 1 for each in range(times)])


def test_a_loop_in_one_line_is_new_until_it_has_run() -> None:
    flow, x = ControlFlow(), torch.ones(3)
    for times, is_new in [(0, True), (0, trace_begins_late(repeats)), (1, True), (2, False)]:
        with flow.traced() as trace:
            repeats(x, times)
        assert trace.is_new == is_new
        trace.learn()


def numbers() -> Iterator[int]:
    yield from itertools.count()


class TakesTheNextOfLargeBatches(Around):
    """No whole batch is large, only the rows of one rank."""

    def __init__(self, numbers: Iterator[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        if x.mean() > 0.5:
            scores = scores * next(self.numbers)
        return scores


class PutsLargeBatches(TakesTheNextOfLargeBatches):
    def __init__(self, sizes: Any) -> None:
        super().__init__(iter(()))
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0.5:
            self.sizes.put(len(x))
        return self.body(x)


class DrawsForLargeBatches(TakesTheNextOfLargeBatches):
    def __init__(self, drawn: Any) -> None:
        super().__init__(iter(()))
        self.drawn = drawn

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        if x.mean() > 0.5:
            scores = scores * self.drawn.random()
        return scores


def halves(steps: int) -> Iterator[Tensor]:
    """Batches of which the first half is large, and the other one is not."""
    for x, _ in batches(steps):
        x[: len(x) // 2] += 3.0
        x[len(x) // 2 :] -= 3.0
        yield x


@pytest.mark.parametrize("make", [numbers, itertools.count])
@ranks(2)
def test_the_rows_of_one_rank_take_nothing_from_an_iterator_while_they_are_compared(
    make: Callable[[], Iterator[int]],
) -> None:
    model = TakesTheNextOfLargeBatches(make()).double()
    with sharding():
        for x in halves(3):
            model(x).sum().backward()
    assert next(model.numbers) == 0


@pytest.mark.parametrize("make", [queue.SimpleQueue, multiprocessing.SimpleQueue])
@ranks(2)
def test_the_rows_of_one_rank_put_nothing_into_a_queue_while_they_are_compared(
    make: Callable[[], Any],
) -> None:
    model = PutsLargeBatches(make()).double()
    with sharding():
        for x in halves(3):
            model(x).sum().backward()
    assert model.sizes.empty()


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng, np.random.RandomState])
@ranks(2)
def test_the_rows_of_one_rank_draw_nothing_while_they_are_compared(
    make: Callable[[int], Any],
) -> None:
    model, other = DrawsForLargeBatches(make(7)).double(), make(7)
    with sharding():
        for x in halves(3):
            model(x).sum().backward()
    assert model.drawn.random() == other.random()


@ranks(2)
def test_the_rows_of_one_rank_write_no_file_while_they_are_compared() -> None:
    class Writing(Around):
        def forward(self, x: Tensor) -> Tensor:
            if x.mean() > 0.5:
                Path(folder, "large").touch()
            return self.body(x)

    with tempfile.TemporaryDirectory() as folder, sharding():
        model = Writing().double()
        for x in halves(3):
            model(x).sum().backward()
        assert not list(Path(folder).iterdir())


@ranks(2)
def test_what_the_rows_of_one_rank_have_taken_from_an_iterator_is_an_error() -> None:
    class TakesLargeRows(TakesTheNextOfLargeBatches):
        def forward(self, x: Tensor) -> Tensor:
            count = int(x.mean() > 0.5)
            return self.body(x) + len(np.fromiter(self.numbers, int, count))

    model = TakesLargeRows(itertools.count()).double()
    large = next(halves(1))
    with sharding(), pytest.raises(ShardedCallError, match=r"the next value of a count \(numbers"):
        model(large)


class LateByAttribute(nn.Linear):
    """Couples its rows from one of its calls on."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.calls, self.start = 0, 80

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scores = super().forward(x)
        if self.calls > self.start:
            scores = scores - scores.mean(0)
        return scores


class LateByBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("calls", torch.tensor(0))

    def is_late(self) -> bool:
        return bool(self.calls % 81 == 80)

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        if self.is_late():
            scores = scores - scores.mean(0)
        self.calls += 1
        return scores


calls_of_all = 0


class LateByVariable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        global calls_of_all
        calls_of_all += 1
        scores = super().forward(x)
        return scores - scores.mean(0) if calls_of_all > 80 else scores


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LateByAttribute, LateByBuffer, LateByVariable])
@ranks(2)
def test_a_branch_by_a_number_is_seen_when_it_is_taken(kind: Callable[..., nn.Linear]) -> None:
    global calls_of_all
    calls_of_all = 0
    model = kind(6, 3) if kind is LateByVariable else kind()
    x = torch.randn(6, 6)
    with sharding():
        for _ in range(80):
            model(x)
        assert modules.call_counts.sharded == 80
        scores = model(x)
    expected = torch.nn.functional.linear(x, model.weight, model.bias)
    torch.testing.assert_close(scores, expected - expected.mean(0))


class LateByClock(nn.Linear):
    """Of which each rank has another number."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.seconds = 0.25

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x) if self.seconds > 80 else super().forward(x)


@ranks(2)
def test_a_branch_by_the_clock_is_taken_by_each_rank_for_itself() -> None:
    model, x = LateByClock(), torch.randn(6, 6)
    with sharding():
        for k in range(90):
            model.seconds = 0.25 + k + 3 * torch.distributed.get_rank()
            model(x)
    assert modules.call_counts.sharded + modules.call_counts.whole == 90


class Finalized:
    def __init__(self, done: list[str]) -> None:
        self.done = done

    def __del__(self) -> None:
        self.done.append("finalized")


def drops(kept: list[Any]) -> None:
    kept.clear()


def test_a_finalizer_is_not_stopped() -> None:
    flow, done = ControlFlow(), []
    with flow.traced() as trace:
        drops([])
    trace.learn()
    kept = [Finalized(done)]
    with flow.traced(stops=True) as trace:
        drops(kept)
    assert done == ["finalized"]
    assert trace.is_new


def test_the_handler_of_a_signal_is_not_stopped() -> None:
    flow, done = ControlFlow(), []
    before = signal.signal(signal.SIGUSR1, lambda *_: done.append("handled"))
    try:
        with flow.traced(stops=True) as trace:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done == ["handled"]
    assert trace.is_new


@pytest.mark.parametrize("function", [sometimes, in_one_line])
def test_a_trace_that_stops_does_so_before_a_new_branch(function: FunctionType) -> None:
    flow, x = ControlFlow(), torch.ones(3)
    for _ in range(2):
        with flow.traced() as trace:
            function(x, False)
        trace.learn()
    with flow.traced(stops=True) as trace:
        function(x, False)
        with pytest.raises(NewBranch):
            function(x, True)
    assert trace.is_new


def test_the_first_calls_are_watched_and_then_some() -> None:
    flow = ControlFlow()
    assert not flow.is_watched(1)
    flow.may_change = True
    assert [calls for calls in (1, 64, 65, 1008, 1024) if flow.is_watched(calls)] == [1, 64, 1024]


class PrintsOnce(Around):
    """Without a branch for it, but with one that is never taken, so that its calls are watched."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        {LATE: print}.get(self.calls, str)("a sixth call")
        return self.body(x) if self.calls < 10**6 else x


@ranks(2)
def test_what_a_watched_call_prints_is_printed_once() -> None:
    model, x, printed = PrintsOnce(), torch.randn(8, 6), io.StringIO()
    with sharding(), contextlib.redirect_stdout(printed):
        for _ in range(LATE + 2):
            model(x)
    assert modules.call_counts.sharded >= LATE - 1
    assert printed.getvalue() == "a sixth call\n"
