"""Gradients of linear layers that the ranks of a host sum from their factors."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import components
import instep
from instep.distributed import one_copy
from instep.training.buckets import in_place_bucket, weight_factors
from instep.training.buckets.weight_factors import Factors
from instep.training.drift import non_finite
from pool import ranks

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs Linux on x86-64"
)
FEATURES = 40


@contextmanager
def small_factors() -> Iterator[list[int]]:
    """Inside, small weights have factors, too. Gives how many of them each sum was made of."""
    products: list[int] = []
    gather = in_place_bucket.gather_factors

    def counted(own: object, rows: Sized, transport: object) -> dict[int, Factors]:
        products.append(len(rows))
        return gather(own, rows, transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_copy, "FEWEST_ELEMENTS", 100)
        patch.setattr(in_place_bucket, "_SMALL_BYTES", 128)
        patch.setattr(weight_factors, "_FEWEST_ELEMENTS", 100)
        patch.setattr(weight_factors, "_LEAST_RATIO", 0.5)
        patch.setattr(in_place_bucket, "gather_factors", counted)
        yield products


class Layers(nn.Module):
    """Weights in two linear layers, and what a case makes of them."""

    def __init__(self, forward: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, FEATURES, bias=False)
        self.case = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.case(self, x)


def chain(layers: Layers, x: Tensor) -> Tensor:
    return layers.last(layers.first(x).tanh())


@components.needs("C++")
@pytest.mark.parametrize("shape", [(13, 37), (6, 16), (1, 300), (40, 515)])
@pytest.mark.parametrize("terms", [0, 1, 7, 64])
def test_the_product_in_c_is_that_of_torch(terms, shape) -> None:
    rows, width = shape
    factors = Factors(torch.randn(terms, rows + 5), torch.randn(terms, width))
    assert weight_factors._compiled() is not None
    out = torch.full((rows + 2, width), 9.0)
    weight_factors._multiply(factors, slice(3, 3 + rows), out[1:-1])
    torch.testing.assert_close(out[1:-1], factors.product()[3:-2])
    assert (out[[0, -1]] == 9).all()


def rows_of(rank: int, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)


class Training:
    """The same model in a replica, with the rows of this rank, and plain, with those of all."""

    def __init__(
        self,
        forward: Callable[[Layers, Tensor], Tensor] = chain,
        counts: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.plain = Layers(forward).to(dtype)
        self.replica = instep.replicate(copy.deepcopy(self.plain))
        counts = counts or [3] * instep.world_size
        self.all_rows = [rows_of(rank, count).to(dtype) for rank, count in enumerate(counts)]
        self.rows = self.all_rows[instep.rank]

    def backward(self, **options: object) -> None:
        """A backward of both. The loss is a sum, so that each row counts as much."""
        loss_of(self.plain, torch.cat(self.all_rows)).backward()
        loss = loss_of(self.replica, self.rows)
        instep.weight(None)
        loss.backward(**options)

    def zero_grad(self) -> None:
        for model in (self.plain, self.replica):
            model.zero_grad()

    def check(self) -> None:
        for (name, mine), theirs in zip(
            self.replica.named_parameters(), self.plain.parameters(), strict=True
        ):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(
                    mine.grad, theirs.grad, msg=lambda m, n=name: f"{n}: {m}"
                )
                assert mine.grad.stride() == mine.stride()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def twice(layers: Layers, x: Tensor) -> Tensor:
    return layers.last(layers.first(layers.first(x).tanh()))


def tied(layers: Layers, x: Tensor) -> Tensor:
    return (layers.last(layers.first(x)).tanh() @ layers.first.weight).tanh()


def tied_before(layers: Layers, x: Tensor) -> Tensor:
    return layers.last(layers.first((x @ layers.first.weight).tanh()))


def sequences(layers: Layers, x: Tensor) -> Tensor:
    return chain(layers, x.view(len(x), 1, FEATURES).expand(-1, 2, -1))


def one_row_at_a_time(layers: Layers, x: Tensor) -> Tensor:
    return torch.stack([layers.last(layers.first(each)) for each in x])


def checkpointed(layers: Layers, x: Tensor) -> Tensor:
    return checkpoint(lambda x: chain(layers, x), x, use_reentrant=False)


def checkpointed_by_backward(layers: Layers, x: Tensor) -> Tensor:
    return checkpoint(lambda x: chain(layers, x), layers.first(x), use_reentrant=True)


def by_function(layers: Layers, x: Tensor) -> Tensor:
    return nn.functional.linear(
        nn.functional.linear(x, layers.first.weight), layers.last.weight, layers.first.bias
    )


def in_place(layers: Layers, x: Tensor) -> Tensor:
    return layers.last(layers.first(x).relu_()).mul_(2)


def saved_elsewhere(layers: Layers, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return chain(layers, x)


CASES: dict[Callable[[Layers, Tensor], Tensor], int] = {
    chain: 2,
    twice: 2,
    tied: 1,
    tied_before: 1,
    sequences: 2,
    one_row_at_a_time: 2,
    checkpointed: 2,
    checkpointed_by_backward: 2,
    by_function: 2,
    in_place: 2,
    saved_elsewhere: 2,
}


@ranks(2, 3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_are_those_of_all_rows(case) -> None:
    with small_factors() as products:
        training = Training(case)
        for _ in range(3):
            training.backward()  # adds up in `.grad`
            training.check()
    assert products == [CASES[case]] * 3


@ranks(3)
def test_ranks_may_have_other_numbers_of_rows_and_none() -> None:
    with small_factors() as products:
        for counts in ((1, 4, 2), (2, 0, 3)):
            training = Training(counts=counts)
            training.backward()
            training.check()
    assert products == [2, 2], products


@ranks(2)
def test_a_rank_may_leave_a_layer_out() -> None:
    def on_rank_0(layers: Layers, x: Tensor) -> Tensor:
        of_rank_0 = layers.first(x[:3]).tanh() if len(x) > 3 or instep.rank == 0 else x[:3]
        return torch.cat([layers.last(of_rank_0), layers.last(x[3:])])

    with small_factors() as products:
        training = Training(on_rank_0)
        training.backward()
        training.check()
    assert products == [2]


@ranks(2)
def test_many_rows_of_one_rank_are_no_factors() -> None:
    with small_factors() as products:
        training = Training(counts=(3, 90))
        training.backward()
        training.check()
    assert products == [0]


@ranks(2)
@pytest.mark.parametrize("later", [False, True])
def test_hooks_of_the_script_see_the_gradient(later) -> None:
    seen = []
    with small_factors() as products:
        training = Training()
        weight = training.replica.first.weight
        if later:
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        else:
            weight.register_hook(lambda grad: seen.append(grad.clone()))
        training.backward()
        training.check()
    torch.testing.assert_close(seen[0], training.plain.first.weight.grad)
    assert products == [1]


@ranks(2)
def test_gradients_that_are_asked_for_are_those_of_this_rank() -> None:
    with small_factors() as products:
        training = Training()
        loss = loss_of(training.replica, training.rows)
        grads = torch.autograd.grad(loss, [*training.replica.parameters()], retain_graph=True)
        own = torch.autograd.grad(
            loss_of(training.plain, training.rows), [*training.plain.parameters()]
        )
        for mine, theirs in zip(grads, own, strict=True):
            torch.testing.assert_close(mine, theirs)
        instep.weight(None)
        loss.backward()
        loss_of(training.plain, torch.cat(training.all_rows)).backward()
        training.check()
    assert products == [2]


@ranks(2)
def test_a_penalty_on_gradients_of_inputs_has_its_gradient() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
        return grad.square().sum()

    with small_factors():
        training = Training()
        loss = penalty(training.replica, training.rows)
        instep.weight(None)
        loss.backward()
        penalty(training.plain, torch.cat(training.all_rows)).backward()
        training.check()


@ranks(2)
@pytest.mark.parametrize("name", ["last.weight", "first.bias"])
def test_a_backward_to_some_leaves_leaves_the_others_alone(name) -> None:
    with small_factors():
        training = Training()
        replica, plain = training.replica, training.plain
        training.backward(inputs=[replica.get_parameter(name)])
        for each, mine in replica.named_parameters():
            if each == name:
                torch.testing.assert_close(mine.grad, plain.get_parameter(name).grad)
            else:
                assert mine.grad is None


@ranks(2)
def test_backwards_without_a_sum_are_added_to_the_next() -> None:
    with small_factors() as products:
        training = Training()
        with instep.no_sync():
            training.backward()
        training.backward()
        training.check()
        training.backward()
        training.check()
    assert products == [0, 2]


@ranks(2)
def test_a_graph_may_have_two_backwards() -> None:
    with small_factors() as products:
        training = Training()
        for model, rows in (
            (training.plain, torch.cat(training.all_rows)),
            (training.replica, training.rows),
        ):
            loss = loss_of(model, rows)
            if model is training.replica:
                instep.weight(None)
            loss.backward(retain_graph=True)
            loss.backward()
        training.check()
    assert products == [2, 2], products


@ranks(2)
def test_what_is_written_to_an_output_gradient_later_changes_nothing() -> None:
    def forward(layers: Layers, x: Tensor) -> Tensor:
        y = layers.first(x)
        if y.requires_grad:
            y.register_hook(kept.append)
            x.register_hook(lambda grad: kept[-1].zero_())
        return layers.last(y.tanh())

    kept: list[Tensor] = []
    with small_factors() as products:
        training = Training(forward)
        training.all_rows = [each.requires_grad_() for each in training.all_rows]
        training.rows = training.all_rows[instep.rank]
        training.backward()
        training.check()
    assert products == [2]


@ranks(2)
def test_transforms_have_nodes_of_their_own() -> None:
    with small_factors() as products:
        training = Training()
        model, x = training.replica, training.rows
        parameters = dict(model.named_parameters())

        def of_row(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (row[None],)).sum()

        each = torch.func.vmap(torch.func.grad(of_row), (None, 0))(parameters, x)
        assert each["first.weight"].shape == (3, FEATURES, FEATURES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch, at the first such call
            _, tangent = torch.func.jvp(model.last, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(tangent, model.last(torch.ones_like(x)))
        training.backward()
        training.check()
    assert products == [2]


@ranks(2)
def test_a_compiled_model_has_graphs_without_breaks() -> None:
    with small_factors() as products:
        training = Training()
        training.replica.case = torch.compile(chain, backend="eager", fullgraph=True)
        training.backward()
        training.check()
    assert products == [0]


@ranks(2)
def test_products_in_half_precision_have_nodes_of_their_own() -> None:
    def forward(layers: Layers, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return chain(layers, x).float()

    with small_factors() as products:
        training = Training(forward, dtype=torch.float32)
        training.backward()
        for mine, theirs in zip(
            training.replica.parameters(), training.plain.parameters(), strict=True
        ):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=0.05)
    assert products == [0]


@ranks(2)
def test_what_is_not_finite_is_found_in_factors() -> None:
    def without_bias(layers: Layers, x: Tensor) -> Tensor:
        return nn.functional.linear(x, layers.first.weight)

    non_finite.reset()
    with small_factors() as products, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        training = Training(without_bias)
        optimizer = torch.optim.SGD(training.replica.parameters(), 0.1)
        y = training.replica(training.rows)
        if instep.rank == 1:
            y.register_hook(lambda grad: grad * float("inf"))
        y.square().sum().backward()
        optimizer.step()
    texts = [str(each.message) for each in found]
    assert [text.startswith("on rank 1 the gradient of") for text in texts] == [True] * instep.rank
    assert products == [1]  # not of what was looked at


@ranks(2, 3)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("compiled", [True, False])
def test_trainings_go_on_as_in_one_process(kind, compiled) -> None:
    with small_factors() as products, pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(weight_factors, "_compiled", lambda: None)
        training = Training(dtype=torch.float32)
        optimizers = [kind(m.parameters(), 1e-3) for m in (training.replica, training.plain)]
        instep.shard(optimizers[0])
        for _ in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            training.backward()
            for model, optimizer in zip(
                (training.replica, training.plain), optimizers, strict=True
            ):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        training.check()
        for mine, theirs in zip(
            training.replica.parameters(), training.plain.parameters(), strict=True
        ):
            torch.testing.assert_close(mine, theirs)
    assert products == [2] * 5
