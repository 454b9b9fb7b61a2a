"""Sums of gradients of which the ranks of a host keep one copy."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.distributed import one_copy
from instep.distributed.shm.shared_buckets import _pieces
from instep.training.buckets import in_place_bucket
from instep.training.buckets.host_sums import HostSums
from instep.training.buckets.reducer import reducer_of
from kept_by_child import kept_by_child
from pool import ranks, talking_over

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="needs Linux on x86-64"
)


@contextmanager
def small_sums() -> Iterator[None]:
    """Inside, the sums of small models are in common memory, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_copy, "FEWEST_ELEMENTS", 100)
        patch.setattr(in_place_bucket, "_SMALL_BYTES", 128)
        yield


class Training:
    """A replica whose ranks have other rows; apart: each rank has sums of its own."""

    def __init__(self, apart: bool = False, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        first, last = nn.Linear(40, 30), nn.Linear(31, 20)
        last.weight = nn.Parameter(torch.randn(31, 20).t())  # not contiguous
        layers = nn.Linear(30, 31), nn.ReLU(), nn.Linear(31, 31, bias=False), last
        self.model = instep.replicate(nn.Sequential(first, *layers).to(dtype))
        self.parameters = list(self.model.parameters())
        self.generator = torch.Generator().manual_seed(instep.rank)
        self.apart, self.dtype = apart, dtype

    @property
    def host_sums(self) -> HostSums:
        (bucket,) = reducer_of[self.parameters[0]]._buckets
        assert isinstance(bucket, in_place_bucket.InPlaceBucket)
        return bucket._host_sums

    @property
    def is_common(self) -> bool:
        return self.host_sums._memory is not None

    def backward(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("INSTEP_HOST_COPY", "off" if self.apart else "auto")
            x = torch.randn(5, 40, generator=self.generator).to(self.dtype)
            self.model(x).square().mean().backward()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]


def assert_same(one: Training, other: Training) -> None:
    for mine, theirs in zip(one.grads(), other.grads(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()


def train_both(
    between: Callable[[Training, int], object] = lambda training, step: None,
    zeroes: bool = True,
    steps: int = 6,
) -> Training:
    """The same training with common sums and without; returns the former."""
    common, apart = Training(), Training(apart=True)
    for step in range(steps):
        for training in (common, apart):
            if zeroes:
                training.zero_grad()
            training.backward()
        assert_same(common, apart)
        for training in (common, apart):
            between(training, step)
        assert_same(common, apart)
    assert not apart.is_common
    return common


@ranks(2, 3)
def test_sums_have_the_bits_that_they_have_in_memory_of_each_rank() -> None:
    with small_sums():
        training = train_both()
        assert training.is_common
        weights = [p for p in training.parameters if p.dim() == 2]
        assert len(training.host_sums._sums) == len(weights) - 1  # one is not contiguous


@ranks(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_floats_are_summed_likewise(dtype) -> None:
    with small_sums():
        common, apart = Training(dtype=dtype), Training(apart=True, dtype=dtype)
        common.backward()
        apart.backward()
        assert common.is_common
        assert_same(common, apart)


@ranks(2)
def test_numbers_with_an_imaginary_part_are_summed_in_memory_of_each_rank() -> None:
    with small_sums():
        weight = nn.Parameter(torch.randn(20, 20, dtype=torch.complex64))
        model = instep.replicate(nn.ParameterList([weight]))
        model[0].abs().mean().backward()
        assert reducer_of[weight]._buckets[0]._host_sums._memory is None


@ranks(2)
def test_few_numbers_are_summed_in_memory_of_each_rank() -> None:
    training = Training()
    training.backward()
    assert not training.is_common


CHANGES: dict[str, Callable[[list[Tensor]], object]] = {
    "clips": lambda grads: nn.utils.clip_grad_norm_([_with_grad(g) for g in grads], 1e-3),
    "scales one": lambda grads: grads[0].mul_(1 + instep.rank),
    "moves": lambda grads: [grad.share_memory_() for grad in grads],
    "zeroes": lambda grads: [grad.zero_() for grad in grads],
}


def _with_grad(grad: Tensor) -> Tensor:
    parameter = torch.empty_like(grad)
    parameter.grad = grad
    return parameter


@ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_script_writes_to_a_sum_stays_there(name) -> None:
    with small_sums():
        training = train_both(lambda training, step: step == 2 and CHANGES[name](training.grads()))
        assert training.is_common


@ranks(2)
def test_a_script_that_writes_in_every_step_gets_sums_of_its_own() -> None:
    found = []

    def scale(training: Training, step: int) -> None:
        training.grads()[0].mul_(2)
        found.append(training.is_common)

    with small_sums():
        train_both(scale, steps=8)
    of_common = found[::2]
    assert of_common.count(True) == one_copy.MOST_WRITES + 1
    assert not of_common[-1]


@ranks(2)
def test_sums_of_several_backwards_add_up() -> None:
    with small_sums():
        assert train_both(zeroes=False).is_common  # but for what the first one left in `.grad`


@ranks(2)
@pytest.mark.parametrize("whose", [0, None])
def test_a_sum_that_a_script_keeps_keeps_its_values(whose) -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(training: Training, step: int) -> None:
        if step == 2 and whose in (None, instep.rank):
            grads = training.grads()
            grads[0].mul_(3)
            kept.extend((grad.flatten()[3:], grad.flatten()[3:].clone()) for grad in grads)

    with small_sums():
        training = train_both(keep)
        assert training.is_common  # again
    for part, values in kept:
        assert torch.equal(part, values)


@ranks(2)
def test_an_array_of_a_sum_keeps_its_values() -> None:
    with small_sums():
        training = Training()
        training.backward()
        array = training.grads()[0].numpy()
        values = array.copy()
        for _ in range(2):
            training.zero_grad()
            training.backward()
        assert (array == values).all()


@ranks(2)
def test_a_child_keeps_the_sums_of_its_fork() -> None:
    with small_sums():
        training = Training()
        training.backward()
        first = training.grads()[0].clone()
        with kept_by_child(training.grads, rank=1):
            for _ in range(3):
                training.zero_grad()
                training.backward()
            assert training.is_common
            assert not torch.equal(first, training.grads()[0])


@ranks(2)
def test_ranks_on_several_numa_nodes_have_sums_of_their_own() -> None:
    with small_sums(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_copy, "numa_nodes", lambda _: {instep.rank})
        assert not train_both(steps=2).is_common


@ranks(2)
def test_a_rank_without_a_gradient_adds_zeros() -> None:
    with small_sums():
        common, apart = Training(), Training(apart=True)
        for step in range(4):
            for training in (common, apart):
                training.zero_grad()
                training.model[-1].weight.requires_grad_(True)
                x = torch.randn(5, 40, generator=training.generator)
                hidden = training.model[:4](x) if step % 2 and instep.rank else training.model(x)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("INSTEP_HOST_COPY", "off" if training.apart else "auto")
                    hidden.square().mean().backward()
            assert_same(common, apart)
        assert common.is_common


def test_over_gloo_each_rank_has_sums_of_its_own() -> None:
    with talking_over("gloo"):
        ranks(2)(backward_over_gloo)()


def backward_over_gloo() -> None:
    with small_sums():
        training = Training()
        training.backward()
        assert not any(
            hasattr(b, "_host_sums") for b in reducer_of[training.parameters[0]]._buckets
        )


@pytest.mark.parametrize("longest", [1, 4, 7, 100])
def test_pieces_are_all_elements_once(longest) -> None:
    sizes = [5, 0, 1, 9, 3]
    for start, stop in itertools.combinations(range(sum(sizes) + 1), 2):
        chunks = _pieces(sizes, start, stop, longest)
        lengths = [sum(hi - lo for _, lo, hi in chunk) for chunk in chunks]
        assert all(length == longest for length in lengths[:-1])
        assert 0 < lengths[-1] <= longest
        elements = [(k, n) for chunk in chunks for k, lo, hi in chunk for n in range(lo, hi)]
        assert elements == [(k, n) for k, size in enumerate(sizes) for n in range(size)][start:stop]
