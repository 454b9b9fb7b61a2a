"""Sharded calls one by one: outputs that stay on their ranks, comparisons, and what is printed."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import pickle
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.fx
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import instep
from instep.distributed.communication.transport import get_transport
from instep.errors import MixedSumsError
from instep.process.patching import ignored_warnings
from instep.training.blocks import Block
from instep.training.draws.kernels import DrawMode
from instep.training.draws.operations import draws_nothing
from instep.training.drift.non_finite import FiniteCheck
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call import modules, outermost_call
from instep.unedited.sharded_call.compare import equivalence
from instep.unedited.sharded_call.compare.rank_mismatch import first_mismatch
from instep.unedited.sharded_call.compare.rounding import tolerance
from instep.unedited.sharded_call.plan import division
from instep.unedited.sharded_call.plan.cache_entry import CacheEntry
from instep.unedited.sharded_call.plan.sharding_plan import ShardingPlan
from instep.unedited.sharded_call.run import grad_sums
from instep.unedited.sharded_call.run.random_numbers import (
    DrawRowDims,
    GlobalBatchDraws,
    intercepted_calls,
)
from instep.unedited.sharded_call.run.sharded_output import ShardedOutput
from instep.unedited.sharded_call.shards.shard_group import ShardGroup
from pool import ranks, talking_over
from sharded_training import Normed, With, mlp, sharding

pytestmark = pytest.mark.slow


@ranks(2)
def test_rows_on_their_ranks_are_an_ordinary_tensor_to_everybody_else() -> None:
    whole = torch.arange(20.0).view(5, 4)
    block = Block(instep.rank, instep.world_size, 5)

    def fresh() -> ShardedOutput:
        rows = whole[block.start : block.stop].clone()
        return ShardedOutput.of(rows, block, ShardGroup.of(get_transport()))

    assert fresh().shape == (5, 4)
    assert len(fresh()) == 5
    assert fresh().view(-1).full is None
    assert torch.equal(fresh(), whole)
    assert torch.equal(fresh().view(-1)[3:8], whole.view(-1)[3:8])
    assert torch.equal(torch.cat((fresh(), fresh())), torch.cat((whole, whole)))
    assert (fresh().numpy() == whole.numpy()).all()
    assert (np.asarray(fresh()) == whole.numpy()).all()
    assert fresh().tolist() == whole.tolist()
    assert repr(fresh()) == repr(whole)
    for again in (pickle.loads(pickle.dumps(fresh())), copy.deepcopy(fresh()), fresh().clone()):
        assert type(again) is Tensor
        assert torch.equal(again, whole)
    changed = fresh()
    changed[0] = 0.0
    changed.mul_(2)
    assert changed.sum() == 2 * whole[1:].sum()


@ranks(2)
def test_a_module_whose_calls_were_sharded_is_freed_with_its_parameters() -> None:
    found = []
    with sharding():
        for _ in range(2):
            model = mlp()
            for _ in range(3):
                model(torch.randn(8, 6)).sum().backward()
            found += [weakref.ref(model), weakref.ref(next(model.parameters()))]
    del model
    gc.collect()
    assert [each() for each in found] == [None] * 4


class CouplesLater(nn.Linear):
    """After some calls its rows begin to depend on each other."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        y = super().forward(input)
        self.__class__.calls += 1
        mean = torch.from_numpy(y.detach().numpy().mean(0) * np.float32(self.calls > 10))
        return y - mean


@ranks(2)
def test_a_sampled_call_finds_what_is_no_longer_the_same() -> None:
    CouplesLater.calls = 0
    model, x = CouplesLater(4, 3), torch.randn(6, 4)
    with sharding() as log:
        outputs = [model(x) for _ in range(17)]
    for found in outputs[-2:]:
        assert found.shape == (6, 3)
        assert torch.allclose(found.mean(0), torch.zeros(3), atol=1e-6)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (15, 2)
    if instep.rank == 0:
        assert "every rank computes CouplesLater whole: its output," in log.getvalue()
        assert "(calls 11 to 15 were divided)" in log.getvalue()


class CouplesWhenTold(nn.Linear):
    coupled = torch.tensor(False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        y = super().forward(input)
        return y - y.mean(0) if self.coupled else y


@ranks(2)
def test_it_is_said_which_calls_may_have_been_sharded_wrongly() -> None:
    """Those after the last one that was compared: here that of another shape."""
    CouplesWhenTold.coupled = torch.tensor(False)
    model = CouplesWhenTold(4, 3)
    with sharding() as log:
        for rows_ in (6, 6, 6, 6, 8, 6, 6, 6, 6):
            model(torch.randn(rows_, 4))
        CouplesWhenTold.coupled.fill_(True)  # in a tensor, where nobody looks
        model(torch.randn(6, 4))
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (9, 1)
    if instep.rank == 0:
        assert "(calls 6 to 9 were divided)" in log.getvalue()


@pytest.mark.parametrize(
    ("compared", "text"),
    [
        (3, " (calls 4 to 5 were divided): what they"),
        (4, " (call 5 was divided): what it"),
        (5, ""),
    ],
)
def test_calls_that_were_divided_are_told_by_their_number(compared: int, text: str) -> None:
    entry = CacheEntry((), calls=6, last_compared=compared)
    assert entry.divided_calls().partition(" returned")[0] == text


class Ordered(nn.Linear):
    """Says of each row at which place in the batch it would be, if that were in order."""

    def forward(self, input: Tensor) -> Any:  # noqa: A002  (torch's name)
        return super().forward(input), input[:, 0].argsort().argsort().tolist()


@ranks(2)
def test_the_line_names_the_attribute_the_buffer_and_the_rank() -> None:
    class Counting(nn.Linear):
        seen = 0

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            self.seen += len(input)
            return super().forward(input)

    class Averaging(nn.Linear):
        mean: Tensor

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            self.mean.lerp_(input.amax(0), 0.5)
            return super().forward(input)

    class Failing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            if len(input) == 4:
                raise ValueError("four of them")
            return super().forward(input)

    class CompiledDropout(nn.Linear):
        """What inductor makes of a dropout: it draws a seed."""

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            seed = torch.empty(1, dtype=torch.int64).random_(-(2**63), 2**63 - 1)
            places = torch.arange(input.numel()).view_as(input)
            return super().forward(input * ((places * 31 + seed) % 7 > 2))

    averaging = Averaging(4, 3)
    averaging.register_buffer("mean", torch.zeros(4))
    for layer, why in (
        (Counting(4, 3), "its attribute 1.0.seen depends on the rows"),
        (averaging, "its buffer 1.0.mean differs"),
        (CompiledDropout(4, 3), "what torch.compile has made of it draws by a row's place in"),
        (
            Failing(4, 3),
            "on rank 1 it cannot be computed for some of its rows (ValueError: four of them)",
        ),
    ):
        model = nn.Sequential(nn.Identity(), nn.Sequential(layer))
        with sharding() as log:
            for _ in range(3):  # it may set itself up in its first calls
                model(torch.randn(7, 4))
        assert modules.call_counts.whole
        if instep.rank == 0:
            assert f"computes Sequential whole: {why}" in log.getvalue(), log.getvalue()


@ranks(2)
def test_a_single_layer_with_much_work_is_sharded_where_its_module_is_whole() -> None:
    class Keeping(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(size, 512), nn.Linear(512, 3)
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.kept.append(self.large(x))
            return self.small(self.kept[-1])

    for size, calls in ((256, 1), (128, 0)):
        model, x = Keeping(size), torch.randn(256, size)
        with sharding():
            for _ in range(2):
                model(x)
            assert (modules.call_counts.sharded, modules.call_counts.whole) == (calls, 2)


def library(source: str) -> dict[str, Any]:
    """What a module of an installed package defines."""
    found: dict[str, Any] = {"__name__": "plotting.hooks", "torch": torch}
    exec(compile(source, "/usr/lib/python3/site-packages/plotting/hooks.py", "exec"), found)
    return found


HOOKS = """
def ask(module, args, output):
    return output.requires_grad_()

def keeper():
    kept = []
    def keep(module, args, output):
        kept.append(output.shape)
    return keep
"""


@ranks(2)
def test_a_hook_of_a_library_keeps_a_module_whole_only_where_it_keeps_what_it_sees() -> None:
    hooks, model, x = library(HOOKS), mlp(), torch.randn(12, 6)
    model[0].register_forward_hook(hooks["ask"])
    with sharding() as log:
        for _ in range(3):
            model(x).sum().backward()
        assert (modules.call_counts.sharded, log.getvalue()) == (3, "")
        handle = model[2].register_forward_hook(hooks["keeper"]())
        model(x)
        assert modules.call_counts.whole == 1
        handle.remove()
        if instep.rank == 0:
            assert "a hook of plotting on its Linear keeps something of what it" in log.getvalue()
    with sharding() as log:
        model[2].register_full_backward_hook(lambda *_: None)
        model(x)
        if instep.rank == 0:
            assert "the script has a hook on its Linear (2), which must" in log.getvalue()


Unseen = ctypes.py_object
"""Holds something, its `value`, where nobody sees that it is another."""


class ReadsFromLists(nn.Module):
    """Reads its parameters from lists to which its attributes lead."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(3) for _ in range(2))
        self.read = [self.weights[0]]
        self.more = Unseen(())

    def forward(self, x: Tensor) -> Tensor:
        for weight in (*self.read, *self.more.value):
            x = x * weight
        return x


@ranks(2)
def test_a_parameter_that_begins_to_be_read_from_a_new_list_is_an_error() -> None:
    model, x = ReadsFromLists(), torch.arange(18.0).view(6, 3)
    with sharding() as log:
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            assert cast(Tensor, model.weights[0].grad).tolist() == x.sum(0).tolist()
        assert (modules.call_counts.sharded, log.getvalue()) == (2, "")
        model.more.value = (model.weights[1],)
        with pytest.raises(ShardedCallError, match="began to use a parameter from an object"):
            model(x)


@ranks(2)
def test_a_parameter_in_another_list_than_before_makes_the_module_whole() -> None:
    model, x = ReadsFromLists(), torch.arange(18.0).view(6, 3)
    with sharding() as log:
        model(x).sum().backward()
        model.read = [model.weights[1]]
        model(x).sum().backward()
        for weight in model.weights:
            assert cast(Tensor, weight.grad).tolist() == x.sum(0).tolist()
        assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 1)
        if instep.rank == 0:
            assert "has replaced an object in which it keeps parameters" in log.getvalue()


class KeepsBlocks(nn.Module):
    """Keeps modules in a list, and their parameters in a ParameterList, as N-BEATS does."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stacks = [[*blocks]]
        self.weights = nn.ParameterList(p for block in blocks for p in block.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stacks[0]:
            x = x - block(x)
        return x


@ranks(2)
def test_parameters_of_modules_in_a_list_are_found() -> None:
    torch.manual_seed(0)
    blocks = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    model, x = KeepsBlocks(*blocks), torch.randn(7, 6)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    with sharding() as log:
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            for p, grad in zip(model.parameters(), expected, strict=True):
                assert torch.allclose(cast(Tensor, p.grad), cast(Tensor, grad), atol=1e-5)
        assert (modules.call_counts.sharded, log.getvalue()) == (2, "")


@ranks(2)
def test_batch_statistics_of_modules_in_a_list_are_those_of_one_call() -> None:
    torch.manual_seed(0)
    linear, norm, x = nn.Linear(6, 6), nn.BatchNorm1d(6), torch.randn(7, 6)
    model, mean = KeepsBlocks(nn.Sequential(linear, norm)), 0.1 * linear(x).mean(0)
    with sharding():
        model(x)
    assert torch.allclose(cast(Tensor, norm.running_mean), mean, atol=1e-6)
    assert int(cast(Tensor, norm.num_batches_tracked)) == 1


class FlipsAtOneRounding(nn.Module):
    """Has a unit that is on if its parameter is the next number after 1, and a little more
    rounding where it has few rows."""

    def __init__(self, rounding: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.rounding = rounding

    def forward(self, x: Tensor) -> Tensor:
        is_on = (self.weight - 1) == torch.finfo(torch.float32).eps
        return x * self.weight * (1 + 1e-4 * is_on) * (1 + self.rounding * (len(x) < 6))


@ranks(2)
@pytest.mark.parametrize(("rounding", "is_sharded"), [(3e-5, True), (3e-3, False)])
def test_rounding_is_known_from_several_perturbations(rounding: float, is_sharded: bool) -> None:
    """The unit is off in the first perturbation and on in the second."""
    model, x = FlipsAtOneRounding(rounding), torch.arange(1.0, 7.0).view(6, 1)
    with sharding() as log:
        model(x).sum().backward()
        assert cast(Tensor, model.weight.grad).item() == pytest.approx(x.sum().item(), rel=1e-4)
        assert modules.call_counts.sharded == int(is_sharded)
        if instep.rank == 0:
            assert ("is not that of the whole batch" in log.getvalue()) is not is_sharded


class ScaledGradient(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


class OtherGradientFlips(nn.Module):
    """A gradient that is another if a parameter is the next number after 1, and one that is another
    where there are few rows."""

    def __init__(self, difference: float) -> None:
        super().__init__()
        self.flips, self.steady = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.difference = difference

    def forward(self, x: Tensor) -> Tensor:
        is_on = (self.flips.detach() - 1) == torch.finfo(torch.float32).eps
        flips = ScaledGradient.apply(self.flips, 1 + 2e-2 * is_on)
        steady = ScaledGradient.apply(self.steady, 1 + self.difference * (len(x) < 6))
        result: Tensor = x * flips + x * steady
        return result


@ranks(2)
@pytest.mark.parametrize(("difference", "is_sharded"), [(1.5e-2, True), (3e-2, False)])
def test_a_gradient_may_be_as_far_off_as_rounding_moves_another(
    difference: float, is_sharded: bool
) -> None:
    model, x = OtherGradientFlips(difference), torch.arange(1.0, 7.0).view(6, 1)
    with sharding() as log:
        model(x).sum().backward()
        assert modules.call_counts.sharded == int(is_sharded)
        if instep.rank == 0:
            why = "its gradients are not those of the whole batch"
            assert (why in log.getvalue()) is not is_sharded


class HasSmallErrors(nn.Module):
    """A gradient that is another where there are few rows: always, or at its first value alone."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.weight, self.always = nn.Parameter(torch.ones(1)), always

    def forward(self, x: Tensor) -> Tensor:
        is_first = self.weight.item() == 1
        is_on = len(x) < 6 and (self.always or is_first)
        result: Tensor = x * ScaledGradient.apply(self.weight, 1 + 1e-3 * is_on)
        return result


@ranks(2)
@pytest.mark.parametrize("always", [True, False])
def test_a_small_error_of_a_gradient_is_an_error_unless_another_rounding_has_none(
    always: bool,
) -> None:
    """As that of a term with a small weight, or of a unit that flips."""
    model, x = HasSmallErrors(always=always), torch.arange(1.0, 7.0).view(6, 1)
    with sharding() as log:
        model(x).sum().backward()
    assert modules.call_counts.sharded == (not always)
    if instep.rank == 0:
        assert ("its gradients are not those of the whole batch" in log.getvalue()) is always


class FalseInPart(nn.Module):
    """The gradient of a parameter is another for a part of the batch."""

    def __init__(self, model: nn.Module, name: str, error: float, numel: int) -> None:
        super().__init__()
        self.model, self.name, self.error, self.numel = model, name, error, numel

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + self.error * (x.numel() < self.numel)
        other = ScaledGradient.apply(self.model.get_parameter(self.name), factor)
        result: Tensor = torch.func.functional_call(self.model, {self.name: other}, (x,))
        return result


class MeanOfPositions(nn.Module):
    """Sums of many terms, in the gradient of a norm's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x).mean(1))
        return result


def bias_before_norm() -> tuple[nn.Module, Tensor]:
    """The gradient of a bias that changes nothing is zero but for the rounding of its terms."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 24, 3, padding=1)
    model = nn.Sequential(convolution, nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2))
    return model, F.pad(torch.rand(100, 1, 8, 24), (3, 21))


def in_half_precision() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MeanOfPositions().to(torch.bfloat16), torch.randn(96, 16, 64, dtype=torch.bfloat16)


@ranks(2)
@pytest.mark.parametrize("make", [bias_before_norm, in_half_precision])
def test_a_long_sum_may_be_as_far_off_as_it_is_from_a_sum_of_two(make: Any) -> None:
    model, x = make()
    with sharding() as log:
        model(x)
    assert (modules.call_counts.sharded, log.getvalue()) == (1, "")


@ranks(2)
@pytest.mark.parametrize(
    ("make", "name", "error"),
    [(bias_before_norm, "1.weight", 1e-2), (in_half_precision, "head.bias", 0.15)],
)
def test_beside_a_long_sum_other_gradients_must_be_the_same(
    make: Any, name: str, error: float
) -> None:
    model, x = make()
    refused(FalseInPart(model, name, error, x.numel()), x, "gradients are not those")


class SquaredGradient(torch.autograd.Function):
    """The identity, whose backward is not linear."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * (1 + 1e-2 * grad.abs())


class HasSquaredGradient(HasSmallErrors):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = SquaredGradient.apply(super().forward(x))
        return result.expand(-1, 4) * 1


@ranks(2)
def test_a_backward_that_is_not_linear_is_not_taken_for_rounding() -> None:
    refused(HasSquaredGradient(always=True), torch.randn(6, 1), "gradients are not those")


class RunsOnce(torch.autograd.Function):
    """The identity, whose backward cannot run again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = [x]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        ctx.kept.pop()
        return grad


class HasSmallErrorsOnce(HasSmallErrors):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = RunsOnce.apply(super().forward(x))
        return result


@ranks(2)
def test_a_backward_that_runs_only_once_is_not_taken_for_rounding() -> None:
    refused(HasSmallErrorsOnce(always=True), torch.randn(6, 1), "gradients are not those")


class HasSmallTerm(nn.Linear):
    """A loss beside many outputs, and a term of it that is not a sum over rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, 100 + y.mean() + 1e-3 * y.amax(0).mean()


@ranks(2)
def test_the_gradient_of_a_loss_is_not_lost_in_those_of_outputs() -> None:
    with sharding() as log:
        HasSmallTerm(4, 30)(torch.randn(60, 4))
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 1)
    if instep.rank == 0:
        assert "its gradients are not those of the whole batch" in log.getvalue()


@ranks(2)
def test_a_list_that_depends_on_the_whole_batch_is_that_of_the_whole_batch() -> None:
    x = torch.tensor([[3.0], [0.0], [5.0], [1.0], [4.0], [2.0]])
    with sharding() as log:
        for _ in range(2):
            assert Ordered(1, 2)(x)[1] == [3, 0, 5, 1, 4, 2]
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 2)
    if instep.rank == 0:
        assert "it returns a list that depends on the rows" in log.getvalue()


def rows_sums_and_losses(y: Tensor) -> list[Tensor]:
    return [
        *(y, y[:, 0], y.unsqueeze(1), y.sum(), y.sum(0), y.mean(), y.mean(0)),
        *(F.cross_entropy(y, y[:, 0].detach().long() * 0), F.l1_loss(y, y.detach() + 1)),
        F.kl_div(y.log_softmax(1), y.detach().softmax(1), reduction="batchmean"),
    ]


@ranks(2)
def test_results_print_as_those_of_one_process() -> None:
    model, x, zeros = With(rows_sums_and_losses), torch.randn(4, 6), torch.zeros(4, 3)

    def printed() -> list[str]:
        results = model(x)
        loss = F.mse_loss(results[0], zeros)
        texts = list(map(repr, [*results, loss]))
        loss /= 2  # what is printed as one operation's result may be changed in place
        return texts

    expected = printed()
    with sharding():
        assert [printed(), printed()] == [expected, expected]
    assert modules.call_counts.sharded == 2


def test_text_is_found_wherever_it_is() -> None:
    for text in (
        "a",
        b"a",
        ["a", "b"],
        [1, ("a",)],
        {"k": "a"},
        {"k": [1, {"l": b"a"}]},
        [{1: "a"}],
    ):
        assert division.has_text(text)
    for other in (1, None, [], (1, 2.0), {"k": 1}, {"k": [1, {"l": None}]}, torch.ones(1)):
        assert not division.has_text(other)


class LearnsLater(nn.Linear):
    """In some batches, and not in their parts, its bias is trained."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        bias = self.bias if len(input) in (8, 4, 12) else self.bias.detach()
        return F.linear(input, self.weight, bias)


@ranks(2)
def test_gradients_of_another_shape_are_proven_too() -> None:
    model = LearnsLater(4, 3)
    with sharding() as log:
        model(torch.randn(8, 4))
        assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 0)
        model(torch.randn(12, 4))
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 1)
    if instep.rank == 0:
        assert "computes LearnsLater whole: its gradients are not those" in log.getvalue()


class TimeFirst(nn.Module):
    """Its backward couples the samples, which are dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Normed.apply(self.lstm(x)[0])


@ranks(2)
def test_the_reason_is_that_of_the_division_that_came_furthest() -> None:
    with sharding() as log:
        TimeFirst()(torch.randn(8, 6, 4))
    if instep.rank == 0:
        assert "computes TimeFirst whole: its gradients are not those" in log.getvalue()


class LastState(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn, self.last = rnn, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.rnn(x)[0][:, -1])
        return scores


@pytest.mark.parametrize("norm", ["", "weight_norm", "spectral_norm"])
@ranks(2)
def test_recurrent_layers_are_divided_in_training_and_evaluation(norm: str) -> None:
    found = []
    for how in (contextlib.nullcontext(), sharding()):
        torch.manual_seed(0)
        model, x = LastState(nn.LSTM(4, 6, 2, batch_first=True)), torch.randn(8, 5, 4)
        if norm:
            getattr(parametrizations, norm)(model.rnn, "weight_hh_l1")
        outputs = []
        with how as log:
            for _ in range(2):
                outputs.append(model.train()(x))
                outputs[-1].sum().backward()
                with torch.no_grad():
                    outputs.append(model.eval()(x + 1))
        found.append([*outputs, *(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(*found)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (4, 0)
    assert log is not None
    assert log.getvalue() == ""


class MakesItsScale(nn.Linear):
    """Makes a parameter when it sees its first batch."""

    scale: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        if "scale" not in self._parameters:
            self.scale = nn.Parameter(1 / x.std())
        return super().forward(x * self.scale)


@ranks(2)
def test_a_forward_that_makes_a_parameter_is_divided_from_the_second_call_on() -> None:
    torch.manual_seed(0)
    with sharding() as log:
        model = MakesItsScale(4, 3)
        for _ in range(3):
            model(torch.randn(8, 4))
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 1)
    if instep.rank == 0:
        assert "its forward makes the parameter scale in this call" in log.getvalue()


class Pair(tuple[int, str]):
    """Not to be taken for a list of things."""

    def __len__(self) -> int:
        raise NotImplementedError


@ranks(2)
def test_a_module_may_keep_a_tuple_that_refuses_to_tell_its_length() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    expected = model(x)
    vars(model)["kind"] = Pair((2, "odd"))
    with sharding() as log:
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (3, 0)
    assert log.getvalue() == ""


def test_sampled_calls_are_few_and_those_with_means_more() -> None:
    for has_sums, expected in ((False, [10, 100]), (True, [1, 2, 3, 4, 10, 100])):
        plan = cast(
            ShardingPlan,
            types.SimpleNamespace(
                has_reductions=has_sums, changes_attributes=False, has_values=True
            ),
        )
        sampled = [n for n in range(1, 101) if CacheEntry((), calls=n).is_sampled(plan)]
        assert sampled == expected


class Wrapped(nn.Module):
    """Returns what nobody can look into; its parts are ordinary."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        body: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        self.body = Wrapped(depth - 1) if depth else body

    def forward(self, x: Tensor) -> Any:
        return {1j: self.body(x)} if isinstance(self.body, Wrapped) else Opaque(self.body(x))


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self.value])


@ranks(2)
def test_after_a_call_by_its_parts_all_is_as_before() -> None:
    x, layer = torch.randn(6, 4), nn.Linear(4, 3)
    with sharding():
        for depth in (0, 1):
            model = Wrapped(depth)
            for _ in range(2):
                model(x)
        modules.call_counts.__init__()  # type: ignore[misc]
        layer(x)
        assert (
            modules.call_counts.sharded,
            modules.call_counts.whole,
            modules.call_counts.samples,
        ) == (1, 0, 3)


class Detector(nn.Module):
    """With targets it returns its loss, whose boxes are no rows of the images."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            return self.loss(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        found = self.forward(batch["images"])
        return (found[batch["image_of_box"]] - batch["boxes"]).square().mean(0).sum()


@ranks(2)
@pytest.mark.parametrize("way", ["as it is", "a hook", "a forward of its own"])
def test_a_modules_calls_of_its_own_forward_are_sharded(way: str) -> None:
    """In a call that is whole; not where `__call__` would do more than `forward`."""
    torch.manual_seed(0)
    models = [Detector() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    calls: list[int] = []
    for model in models:
        if way == "a hook":
            model.register_forward_hook(lambda *_: calls.append(1))
        if way == "a forward of its own":
            model.forward = types.MethodType(Detector.forward, model)  # type: ignore[method-assign]
    batches = []
    for _ in range(5):
        places, boxes = torch.arange(11) % 6, torch.randn(11, 3)
        batches.append({"images": torch.randn(6, 4), "image_of_box": places, "boxes": boxes})
    for batch in batches:
        models[1](batch).backward()
    with sharding():
        for batch in batches:
            torch.autograd.backward(models[0](batch))
        counts = copy.copy(modules.call_counts)
    assert counts.sharded == (0 if way == "a hook" else 4)  # the first call was compared
    assert len(calls) == (2 * len(batches) if way == "a hook" else 0)
    for mine, whole in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert mine.grad is not None
        assert whole.grad is not None
        assert torch.allclose(mine.grad, whole.grad, atol=1e-6)
    for mine, whole in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.allclose(mine, whole, atol=1e-6)
    assert ("forward" in vars(models[0])) == (way == "a forward of its own")


class Bucket:
    """A bucket, as far as a backward looks at it."""

    def __init__(self, *, starts_early: bool = True) -> None:
        self.starts_early = starts_early
        self.started = self.waited = self.written = False

    def separate(self, _: object) -> None:
        assert not self.started

    def start(self, _: object) -> None:
        assert not self.started
        self.started = True

    def start_second_phase(self, _: object) -> None:
        assert self.started

    def wait(self) -> None:
        assert self.started
        self.waited = True

    def write_grads(self, skip: object) -> None:
        assert self.waited
        self.written = True

    def last_small_grad(self) -> None:
        """It has none."""

    def reset(self) -> None:
        assert self.written


def test_sums_travel_as_soon_as_all_calls_have_brought_their_parts() -> None:
    """In one order on all ranks, while backward goes on."""
    twice, once, late, last = Bucket(), Bucket(), Bucket(starts_early=False), Bucket()
    buckets: list[Any] = [twice, once, late, last]
    calls: list[Any] = [
        types.SimpleNamespace(buckets=buckets),
        types.SimpleNamespace(buckets=[twice]),
    ]
    check = FiniteCheck((), None, 0)
    backward = grad_sums.BucketedBackward((), calls, get_transport(), check)

    def started() -> list[bool]:
        return [bucket.started for bucket in buckets]

    with backward:
        for bucket in buckets[1::-1]:
            backward.finish_call(bucket)
            assert started() == [False] * 4
        backward.finish_call(buckets[0])
        assert started() == [True, True, False, False]
        for bucket in buckets[2:]:
            backward.finish_call(bucket)
            assert started() == [True, True, False, False]
    assert started() == [True] * 4
    assert all(bucket.written for bucket in buckets)


ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@pytest.mark.parametrize(
    ("given", "named", "off"),
    [
        ((), {}, True),
        ((None,), {}, True),
        ((None, 0.0), {}, True),
        ((None, 0.5), {}, False),
        ((), {"dropout_p": 0.5}, False),
        ((None,), {"dropout_p": 0.0}, True),
    ],
)
def test_attention_draws_where_it_has_dropout(
    given: tuple[Any, ...], named: dict[str, Any], off: bool
) -> None:
    x = torch.ones(1, 1, 2, 2)
    assert draws_nothing(ATTENTION, (x, x, x, *given), named) is off
    assert draws_nothing(torch.ops.aten.dropout.default, (x, 0.0, True), {}) is False


@ranks(3)
def test_rounding_that_a_module_enlarges_is_distinguished_from_other_numbers() -> None:
    """Normalisation of features that are nearly alike enlarges rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32, eps=1e-12), nn.Linear(32, 4)
    )
    x = torch.rand(64) + 1e-3 * torch.randn(9, 64)
    exact = copy.deepcopy(model).double()(x.double())
    before = [parameter.clone() for parameter in model.parameters()]
    with sharding():
        y = model(x)
        assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 0)
        for _ in range(9):  # the last one is compared with the whole forward again
            model(x)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (10, 0)
    assert 1e-5 < (y - exact).norm() / exact.norm() < 1e-1
    assert all(map(torch.equal, before, model.parameters()))
    y.sum().backward()


def refused(module: nn.Module, x: Tensor, what: str) -> None:
    """Its output or gradients are seen not to be the same when it is sharded."""
    with sharding() as log:
        module(x)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 1)
    if instep.rank == 0:
        name = type(module).__name__
        assert f"computes {name} whole: its {what}" in log.getvalue()


@pytest.mark.parametrize(("dtype", "little"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@ranks(2)
def test_rows_that_know_a_little_of_each_other_are_not_taken_for_rounding(
    dtype: torch.dtype, little: float
) -> None:
    class Coupled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            y = super().forward(input)
            return y - little * y.amax(0)

    refused(
        Coupled(6, 3, dtype=dtype),
        torch.randn(8, 6, dtype=dtype),
        "output, a tensor of shape [8, 3], is not that",
    )


@ranks(3)
def test_where_little_but_rounding_is_left_every_rank_computes_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32, eps=1e-12))
    with sharding(), torch.no_grad():
        model(torch.rand(64) + 1e-6 * torch.randn(9, 64))
    assert modules.call_counts.whole > 0


@pytest.mark.parametrize("learning", [range(5), range(5, 9)])
@ranks(2)
def test_a_gradient_that_only_the_whole_or_only_its_parts_have_is_noticed(learning: range) -> None:
    class Fickle(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            bias = self.bias if len(input) in learning else self.bias.detach()
            return F.linear(input, self.weight, bias)

    refused(Fickle(6, 3), torch.randn(8, 6), "gradients are not those")


@ranks(2)
def test_a_wrong_gradient_of_what_came_in_is_noticed() -> None:
    class Coupled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            return super().forward(Normed.apply(input))

    refused(Coupled(6, 3), torch.randn(8, 6, requires_grad=True), "gradients are not those")


@ranks(2)
def test_a_wrong_gradient_is_not_taken_for_that_of_half_precision() -> None:
    class Coupled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
            return Normed.apply(super().forward(input))

    with torch.autocast("cpu", torch.bfloat16):
        refused(Coupled(6, 3), torch.randn(8, 6), "gradients are not those")


@ranks(2)
def each_rank_another() -> None:
    models, x = [nn.Linear(4, 3) for _ in range(2)], torch.randn(6, 4)
    with sharding():
        outputs = [model(x) for model in models]
        with pytest.raises(MixedSumsError, match="another rank"):
            outputs[instep.rank].sum().backward()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_sums_of_different_modules_gradients_are_an_error(backend: str) -> None:
    with talking_over(backend):
        each_rank_another()


def test_rounding_on_a_gpu_is_that_of_tf32_unless_the_script_forbids_it() -> None:
    assert tolerance(torch.float32, "cuda") == tolerance(torch.float16)
    assert tolerance(torch.float64, "cuda") == tolerance(torch.float64)
    kinds: list[Any] = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn]  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        assert tolerance(torch.float32, "cuda") == tolerance(torch.float32)
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


def test_attention_without_dropout_draws_nothing_and_asks_for_no_other_rows() -> None:
    q, k, v = torch.randn(3, 2, 1, 5, 4).requires_grad_()
    expected = F.scaled_dot_product_attention(q, k, v)
    nobody: Any = None  # no way to ask another rank
    draws = GlobalBatchDraws([Block(0, 2, 4)], 0, nobody, DrawRowDims(), nobody)
    on_other_devices = DrawMode(lambda func, args, kwargs: pytest.fail(f"{func} would draw"))
    for intercepted in (intercepted_calls(draws.run), on_other_devices):
        with intercepted:
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)


@ranks(2)
def channels_last() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    with sharding():
        model(torch.randn(4, 3, 5, 5)).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_gradients_lie_in_memory_as_their_parameters_do(backend: str) -> None:
    with talking_over(backend):
        channels_last()


@ranks(3)
def test_evaluation_in_inference_mode_is_sharded() -> None:
    model, x = mlp(nn.BatchNorm1d(8)).eval(), torch.randn(7, 6)
    whole = model(x)
    with sharding(), torch.inference_mode():
        assert torch.allclose(model(x), whole)
        assert torch.allclose(model(x), whole)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 0)


@ranks(2)
def test_a_parameter_among_the_outputs_does_not_keep_an_evaluation_whole() -> None:
    class Towers(nn.Linear):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002  (torch's name)
            return super().forward(input), self.bias

    model, x = Towers(6, 3), torch.randn(8, 6)
    with sharding() as log, torch.no_grad():
        assert torch.equal(model(x)[1], model.bias)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 0)
    assert log.getvalue() == ""


class Attending(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        h = super().forward(x, x, x, need_weights=False)[0]
        return nn.functional.dropout(h) + h


@pytest.mark.parametrize("rows", [3, 4])
@ranks(3)
def test_one_row_is_drawn_for_and_gathered_in_the_order_of_the_whole_batch(rows: int) -> None:
    """Attention's output lies in memory place by place, which the strides of one row do not tell:
    dropout would take another mask, here and in what follows."""
    model, x = Attending(6, 2, batch_first=True), torch.randn(rows, 4, 6)
    torch.manual_seed(1)
    whole = nn.functional.dropout(model(x))
    with sharding():
        for _ in range(2):  # compared, and by the plan
            torch.manual_seed(1)
            assert torch.allclose(nn.functional.dropout(model(x)), whole)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 0)


@ranks(3)
def test_one_row_tells_nothing_of_batches_of_many() -> None:
    model, many = mlp(nn.BatchNorm1d(8)).eval(), torch.randn(7, 6)
    with sharding() as log, torch.no_grad():
        for x in (many[:1], many, many[:1], many):
            model(x)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 2)
    if instep.rank == 0:
        assert log.getvalue().count("\n") == 1
        assert "whole where a batch has fewer rows than there are ranks;" in log.getvalue()


class StatefulLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return self.lstm(x, state)[0].square()


@ranks(2)
def test_the_layers_of_a_state_are_no_samples() -> None:
    """With one sample; with many the state is divided as they are."""
    model, x = StatefulLSTM(), torch.randn(6, 5, 6)
    with sharding() as log:
        for rows in (1, 6, 1, 6):
            model(x[:rows], (torch.randn(2, rows, 4), torch.randn(2, rows, 4))).sum().backward()
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 2)
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes StatefulLSTM whole where its first argument has fewer "
            "rows than there are ranks; other batches are not affected. [INS711]\n"
        )


@ranks(2)
def test_that_a_batch_is_small_is_said_once_and_not_of_every_part() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), mlp(nn.ReLU())), torch.randn(1, 6)
    with sharding() as log:
        for _ in range(3):
            model(x)
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes Sequential whole where a batch has fewer rows than "
            "there are ranks; other batches are not affected. [INS711]\n"
        )


@ranks(2)
def test_what_fails_for_some_rows_is_reported_with_its_exception_for_one_size() -> None:
    with sharding() as log:
        for size in (6, 10):
            nn.Linear(size, 3)(torch.randn(size))  # no batch, but one sample
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes Linear whole: it cannot be computed for some of its rows "
            "(RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 6x3)). [INS711]\n"
        )


class ChangesWhatItSaved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).exp()
        x.detach().mul_(2)
        return x


@ranks(2)
def test_gradients_that_cannot_be_computed_are_reported_with_torchs_whole_sentence() -> None:
    with sharding() as log:
        ChangesWhatItSaved(6, 3)(torch.randn(4, 6))
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes ChangesWhatItSaved whole: gradients of its outputs cannot "
            "be computed (one of the variables needed for gradient computation has been modified "
            "by an inplace operation: [torch.FloatTensor [4, 3]], which is output 0 of "
            "Exp, is at version 1; expected version 0 instead). [INS711]\n"
        )


@ranks(2)
def test_a_report_says_that_other_calls_of_the_module_are_divided() -> None:
    """As a recurrent network that is trained on batches, and generates from one state of two
    layers."""
    model = nn.Linear(6, 3)
    with sharding() as log:
        for x in (torch.randn(4, 6), torch.randn(6), torch.randn(4, 6)):
            model(x)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 1)
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes some calls of Linear whole, while its others are divided: "
            "it cannot be computed for some of its rows (RuntimeError: mat1 and mat2 shapes cannot "
            "be multiplied (1x3 and 6x3)). [INS711]\n"
        )


@ranks(2)
def test_a_call_without_rows_says_so() -> None:
    with sharding() as log:
        nn.PReLU()(torch.tensor(2.0))
    if instep.rank == 0:
        assert log.getvalue() == (
            "instep: every rank computes PReLU whole where none of its arguments has rows. "
            "[INS711]\n"
        )


@ranks(2)
def test_ranks_that_differ_are_reported() -> None:
    x = torch.randn(6, 4)
    torch.manual_seed(instep.rank)  # as from the clock
    model = nn.Linear(4, 3)
    with sharding() as log:
        assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
        model.load_state_dict(instep.broadcast_object(model.state_dict()))
        model.train(False)(x + instep.rank)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 2)
    if instep.rank == 0:
        said = log.getvalue()
        assert "Linear whole: its parameters are not the same on rank 1 as on rank 0 (" in said
        assert "it is called with arguments that are not the same on rank 1 as on rank 0 (" in said


@ranks(2)
def test_a_buffer_that_differs_is_named_and_the_next_call_is_tried() -> None:
    class Filling(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            left_in_memory = torch.full((3,), float(instep.rank))
            self.register_buffer("shift", left_in_memory)
            self.is_filled = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_filled:
                self.shift.zero_()
                self.is_filled = True
            return super().forward(x) + self.shift

    torch.manual_seed(0)
    model = Filling()
    with sharding() as log:
        for _ in range(3):
            model(torch.ones(6, 4))
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 1)
    if instep.rank == 0:
        assert log.getvalue() == ""


@ranks(2)
def test_a_buffer_that_keeps_differing_is_named() -> None:
    model = nn.Linear(4, 3)
    model.weight.data.fill_(1)
    model.bias.data.fill_(1)
    model.register_buffer("shift", torch.full((3,), float(instep.rank)))
    with sharding() as log:
        for _ in range(4):
            model(torch.ones(6, 4))
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (0, 4)
    if instep.rank == 0:
        assert "Linear whole: its buffer shift is not the same on rank 1 as" in log.getvalue()


@ranks(2)
def test_that_a_batch_is_small_is_not_said_of_what_is_whole_anyway() -> None:
    class Coupled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y - y.amax(0)

    torch.manual_seed(0)
    model, x = Coupled(4, 3), torch.randn(6, 4)
    with sharding() as log:
        model(x)
        model(x[:1])
    if instep.rank == 0:
        assert log.getvalue().count("[INS711]") == 1
        assert "is not that of the whole batch" in log.getvalue()


@ranks(2)
def test_rows_that_are_not_as_many_any_more_are_named() -> None:
    class OfTwo(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if len(x) != len(y):
                return super().forward(x) * super().forward(y).mean()
            return super().forward(x) * super().forward(y)

    torch.manual_seed(0)
    model, x = OfTwo(4, 3), torch.randn(6, 4)
    with sharding() as log:
        model(x, x + 1)
        model(x, x[:5])
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 1)
    if instep.rank == 0:
        assert "OfTwo whole where those of its arguments that have been divided" in log.getvalue()


class OfSparse(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight) + self.bias.sum()


@ranks(2)
def test_sparse_arguments_have_rows_if_their_layout_has() -> None:
    torch.manual_seed(0)
    model, x = OfSparse(3, 4), torch.randn(7, 4).relu()
    expected = model(x)
    with sharding() as log:
        outputs = [model(x.to_sparse()), model(x.to_sparse())]
        assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 0)
        with ignored_warnings("Sparse CSR"):
            outputs.append(model(x.to_sparse_csr()))
    assert all(torch.allclose(output, expected) for output in outputs)
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (2, 1)
    if instep.rank == 0:
        assert "OfSparse whole where it is given a sparse tensor of whose layout" in log.getvalue()


@ranks(2)
def test_the_buffers_of_a_scripted_part_that_fx_has_traced_take_one_step() -> None:
    torch.manual_seed(0)
    with ignored_warnings("`torch.jit.script"):
        scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))
    model = torch.fx.symbolic_trace(nn.Sequential(scripted, nn.Linear(8, 3)))
    with sharding() as log:
        for _ in range(2):
            model(torch.randn(6, 6)).sum().backward()
    assert int(scripted[1].num_batches_tracked) == 2
    if instep.rank == 0:
        assert "_c is a scripted module with buffers that cannot be seen" in log.getvalue()


@ranks(2)
def test_ranks_that_round_differently_are_alike() -> None:
    """On unlike processors, or on GPUs, what each rank computes for itself has other bits."""
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 30_000), nn.Linear(30_000, 3))
    with sharding() as log, torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-6 * instep.rank)
        model(x * (1 + 1e-6 * instep.rank))
    assert log.getvalue() == ""
    assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 0)


@pytest.mark.parametrize(
    ("value", "other", "same"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.ones(70_000), torch.ones(70_000).index_fill(0, torch.tensor([69_999]), 2.0), False),
        (torch.ones(3), torch.ones(3, 1), False),
        (torch.ones(3), torch.ones(3).double(), False),
        (torch.zeros(3), torch.zeros(3), True),
        (torch.zeros(3), torch.tensor([0.0, 1e-9, 0.0]), False),
        (torch.ones(2) * 1j, torch.ones(2) * -1j, False),
        (torch.empty(0), torch.empty(0), True),
        (1.0, 1.0 + 1e-9, False),
        ("train", "train", True),
        ("train", 3, False),
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["a", "c"], False),
        (np.ones(3), np.ones(3), True),
        (np.ones(3), np.ones(3) * (1 + 1e-10), True),
        (np.ones(3), np.array([1.0, 1.0, 2.0]), False),
        (np.arange(3), np.array([0, 1, 3]), False),
        ([torch.ones(1), np.ones(2)], [torch.ones(1), np.ones(2) * 2], False),
    ],
)
@ranks(2)
def test_what_counts_as_the_same_on_all_ranks(value: Any, other: Any, same: bool) -> None:
    mine = [torch.ones(2), other if instep.rank else value]
    why = first_mismatch(nn.Linear(1, 1), mine, get_transport())
    assert (why is None) is same


@ranks(2)
def test_a_model_that_was_made_in_inference_mode_is_sharded() -> None:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model = mlp(nn.BatchNorm1d(8)).eval()
        expected = model(x)
        with sharding() as said:
            torch.testing.assert_close(model(x), expected)
            assert (modules.call_counts.sharded, said.getvalue()) == (1, "")


@ranks(2)
def test_operations_are_counted_for_whole_batches() -> None:
    model, x = mlp(), torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    counters = [FlopCounterMode(display=False) for _ in range(2)]
    with counters[0]:
        model(x)
    with sharding() as said:
        model(x)
        with counters[1]:
            model(x)
        assert (modules.call_counts.sharded, modules.call_counts.whole) == (1, 1)
    assert counters[1].get_total_flops() == counters[0].get_total_flops() > 0
    assert instep.rank or "where a FlopCounterMode sees its operations" in said.getvalue()


class CountedRows(TorchFunctionMode):
    """Counts the rows that go through linear layers."""

    rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.rows += len(args[0]) if func is F.linear else 0
        return func(*args, **kwargs or {})


@ranks(2)
def test_a_scripts_function_modes_and_hooks_on_saved_tensors_see_whole_batches() -> None:
    model, x = mlp(), torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(len(tensor))
        return tensor

    def run() -> list[int]:
        saved.clear()
        with CountedRows() as mode:
            model(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        return [mode.rows, *saved]

    expected = run()
    with sharding() as said:
        for _ in range(2):  # torch's own see rows
            with torch.device("cpu"), torch.autograd.graph.save_on_cpu():
                model(x).sum().backward()
        assert modules.call_counts.sharded == 2
        assert run() == expected
        assert modules.call_counts.sharded == 2
    told = said.getvalue()
    assert instep.rank or "where a CountedRows sees its calls of torch's functions" in told
    assert instep.rank or "where the script's saved_tensors_hooks see its tensors" in told


@ranks(2)
def test_contexts_of_gradient_checkpointing_are_entered_inside_of_a_call_and_outside() -> None:
    entered: list[str] = []

    class Noted(AbstractContextManager[None]):
        def __init__(self, what: str) -> None:
            self.what = what

        def __enter__(self) -> None:
            entered.append(self.what)

        def __exit__(self, *error: object) -> None:
            pass

    def saving(function: Callable[..., Any], x: Tensor) -> Tensor:
        contexts = (Noted("forward"), Noted("again"))
        result: Tensor = torch.utils.checkpoint.checkpoint(
            function, x, use_reentrant=False, context_fn=lambda: contexts
        )
        return result

    with sharding():
        model = With(lambda y: saving(torch.sin, y))
        model(torch.arange(72.0).view(12, 6)).sum().backward()
        assert modules.call_counts.sharded == 1
        del entered[:]
        model(torch.arange(72.0).view(12, 6)).sum().backward()
        assert entered == ["forward", "again"]
        saving(torch.sin, torch.ones(3, requires_grad=True)).sum().backward()
        assert entered == ["forward", "again"] * 2


class DrawingPlaces(nn.Module):
    """Draws places in a sequence, whose length is a multiple of each rank's rows, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.randint(12, (12, 2))
        return nn.functional.dropout(self.body(x[:, places].sum(2)), 0.5)


@ranks(2)
def test_a_draw_that_only_looks_as_if_it_had_rows_is_made_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = DrawingPlaces(), torch.randn(8, 12, 4)
    torch.manual_seed(1)
    expected = [model(x) for _ in range(3)]
    torch.manual_seed(1)
    with sharding() as log:
        found = [model(x) for _ in range(3)]
    assert (modules.call_counts.sharded, log.getvalue()) == (3, "")
    torch.testing.assert_close(found, expected)


@ranks(2)
def test_a_draw_whose_sequence_is_as_long_as_the_part_has_rows_is_divided_by_rows() -> None:
    torch.manual_seed(0)
    model = nn.GRU(4, 5, 2, batch_first=True, dropout=0.5)  # which draws after it has transposed
    xs = [torch.randn(rows, 4, 4) for rows in (8, 12, 7, 8)]
    torch.manual_seed(1)
    expected = [model(x) for x in xs]
    torch.manual_seed(1)
    with sharding() as log:
        found = [model(x) for x in xs]
    assert (modules.call_counts.sharded, log.getvalue()) == (4, "")
    torch.testing.assert_close(found, expected)


class MeanOfMasked(nn.Module):
    """As pytorch-crf: refuses a mask that leaves out a first element."""

    def __init__(self, by_tokens: bool) -> None:
        super().__init__()
        self.body, self.by_tokens = nn.Linear(3, 1), by_tokens

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask[:, 0].all():
            raise ValueError("mask of the first timestep must all be on")
        kept = self.body(x).squeeze(2).tanh() * mask
        ones = mask.flatten().float()  # sums by products are not seen as sums
        return kept.flatten() @ ones / (ones @ ones) if self.by_tokens else kept.sum(1).mean()


@pytest.mark.parametrize(("by_tokens", "sharded"), [(False, 3), (True, 0)])
@ranks(2)
def test_a_mean_over_rows_is_told_from_one_over_tokens_though_not_every_mask_is_taken(
    by_tokens: bool, sharded: int
) -> None:
    torch.manual_seed(0)
    model, x = MeanOfMasked(by_tokens), torch.randn(8, 5, 3)
    full = torch.ones(8, 5, dtype=torch.bool)
    ragged = torch.arange(5) < torch.arange(1, 9)[:, None]
    expected = [model(x, mask) for mask in (full, ragged, full)]
    with sharding():
        found = [model(x, mask) for mask in (full, ragged, full)]
    assert modules.call_counts.sharded == sharded
    torch.testing.assert_close(found, expected)


class Wrapper(nn.Module):
    """Holds another module, as odeint's own wrapper of the function that it integrates."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * 2
        return y


@ranks(2)
def test_of_modules_that_are_made_anew_in_each_step_only_their_parts_are_sharded() -> None:
    model, x = mlp(), torch.randn(8, 6)
    with sharding() as log:
        counts = []
        for _ in range(5):
            Wrapper(model)(x).sum().backward()
            counts.append((modules.call_counts.sharded, modules.call_counts.whole))
        if instep.rank == 0:
            assert "Wrapper whole: the script makes a new one in each step" in log.getvalue()
    assert counts == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]


class SumsRows(nn.Linear):
    """Cannot be sharded."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(0)


@ranks(2)
def test_after_some_that_were_found_whole_others_like_them_are_not_compared() -> None:
    compared: list[nn.Module] = []

    def compare(call: Any, *rest: Any, **kwargs: Any) -> Any:
        compared.append(call.module)
        return equivalence.find_plan(call, *rest, **kwargs)

    x = torch.randn(8, 6)
    made = [SumsRows(6, 3) for _ in range(6)]
    others = [SumsRows(6, 2), nn.Linear(6, 3)]
    with pytest.MonkeyPatch.context() as patch, sharding() as log:
        patch.setattr(outermost_call, "find_plan", compare)
        made[0].eval()(x).sum().backward()  # a module counts once, in how many modes ever
        made[0].train()
        for model in [*made, *others]:
            model(x).sum().backward()
        assert modules.call_counts.sharded == 1
        if instep.rank == 0:
            assert log.getvalue().count("SumsRows whole") == 1  # whatever the shape of its output
    assert compared == [made[0], *made[:4], *others]


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, torch may warn of what it calls itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@ranks(2)
def test_forward_mode_derivatives_go_through_whole_calls() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), torch.randn(8, 6)
    with without_warnings(), sharding() as said:
        _, expected = torch.func.jvp(model, (x,), (x,))
        model(x).sum().backward()
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent
        output, derivative = torch.func.linearize(model, x)
        torch.testing.assert_close(output, model(x))
    told = said.getvalue().splitlines()
    assert [line.partition(";")[0] for line in told] == [
        "instep: every rank computes Sequential whole inside of a transform of torch.func (grad, "
        "vmap and so on)",
        "instep: every rank computes Sequential whole where torch.autograd.forward_ad "
        "differentiates it",
    ] * (not instep.rank)
    assert found is not None
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(derivative(x), expected)


@ranks(2)
def test_modules_can_be_scripted() -> None:
    x = torch.randn(8, 6)
    expected = nn.BatchNorm1d(6)(x)
    with without_warnings(), sharding():
        scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)))
        torch.testing.assert_close(scripted[0](x), expected)
        assert scripted(x).requires_grad
        frozen = torch.jit.freeze(scripted.eval())
        torch.testing.assert_close(frozen(x), scripted(x))


@ranks(2)
def test_a_weight_that_is_cached_beyond_a_call_has_the_gradients_of_one_process() -> None:
    x, grads = torch.randn(8, 6), []
    for how in (contextlib.nullcontext(), sharding()):
        torch.manual_seed(0)
        model = weight_norm(nn.Linear(6, 4))
        with how:
            model(x).sum().backward()
            with parametrize.cached():
                (model(x).sum() + model(x + 1).sum() + model.weight.square().sum()).backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)
