"""A bucket whose gradients stay where autograd has put them: between CPU ranks of one host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.process.torch_private.tensors import (
    flatten_dense_tensors,
    foreach_copy_,
    unflatten_dense_tensors,
)
from instep.training.buckets.codec import as_real
from instep.training.buckets.grad_bucket import GradBucket
from instep.training.buckets.host_sums import HostSums, SumState
from instep.training.buckets.layout import BucketLayout
from instep.training.buckets.weight_factors import (
    Factors,
    are_small_for,
    gather_factors,
    may_be_factored,
    multiply_and_gather,
    no_factors,
)

_SMALL_BYTES = 16 << 10
"""Gradients of up to this many are packed for the sum: to sum each by itself takes longer."""


class InPlaceBucket(GradBucket):
    """Gradients stay where they are; the caller's thread sums them when backward has ended.

    All ranks lay them out in memory as the parameter is. Those of linear layers may be factors.
    """

    # Autograd puts the last gradient into `.grad` only after its hook. And a gradient that was
    # handed over may still be needed for what is before the parameter.
    starts_early = False

    def __init__(
        self, layout: BucketLayout, parameters: Mapping[int, Tensor], ids: Sequence[int]
    ) -> None:
        super().__init__(layout, parameters, ids)
        self._grads: dict[int, Tensor] = {}
        self._factors: dict[int, Factors] = {}
        """Gradients, or parts of them, by the indices of their weights."""
        self._totals: dict[int, Tensor] = {}
        """By the numbers of the slots."""
        self._flags = self._trailer
        self._host_sums = HostSums()
        self._large = [
            k
            for k, slot in reversed(tuple(enumerate(layout.slots)))
            if (parameter := parameters[slot.index]).nbytes > _SMALL_BYTES
            and parameter.is_contiguous()
        ]
        """Which slots have sums of which the host may keep one copy; in the order of the model, as
        the ranks divide the steps of optimizers."""
        self._weights = [
            k for k in self._large if may_be_factored(parameters[layout.slots[k].index])
        ]
        """Which of them may have factors."""

    def add(self, index: int, grad: Tensor) -> None:
        if index in self.filled:
            grad = self._grads[index] + grad
        parameter = self._parameters[index]
        if not (grad.is_contiguous() and parameter.is_contiguous()):
            grad = _with_layout_of(parameter, grad)
        self._grads[index] = grad
        self.filled.add(index)

    def add_accumulated(self, index: int) -> None:
        self._before[index] = None
        self.filled.add(index)

    def intercept(self, index: int, grad: Tensor, partial: bool) -> None:
        parameter = self._parameters[index]
        self._before[index] = None
        if parameter.grad is not None and not partial:
            self._before[index] = parameter.grad
            parameter.grad = None
        self.filled.add(index)

    def add_again(self, index: int, grad: Tensor) -> None:
        """Autograd adds it to what is in `.grad`."""

    def add_factors(self, index: int, factors: Factors, ranks: int) -> bool:
        if all(self.layout.slots[k].index != index for k in self._weights):
            return False
        earlier = self._factors.get(index)
        if earlier is not None:
            factors = Factors(*map(torch.cat, zip(earlier, factors, strict=True)))
        if not are_small_for(factors.rows, self._parameters[index], ranks):
            return False
        if index not in self.filled:
            self.intercept(index, factors.inputs, partial=False)
        self._factors[index] = factors
        return True

    def separate(self, storages: set[int]) -> None:
        for index in self.filled:
            grad = self._dense_grad(index)
            if grad is None:
                continue
            storage = grad.untyped_storage()
            pointer = storage.data_ptr()
            if pointer in storages or storage.nbytes() != grad.nbytes:
                self._grads[index] = grad.clone()
            storages.add(pointer)

    def _start(self, transport: Transport) -> None:
        self._flags = self._trailer.clone()
        for k, slot in enumerate(self.layout.slots):
            if slot.index not in self.filled:
                self._flags[k] = 0
        like = {k: self._parameter_or_zeros(k) for k in self._large}
        factors = self._own_factors()
        grads = {k: self._own_or_zeros(k) for k in like if k not in factors}
        can_share = self._host_sums.can_begin(like.values(), transport)
        state = self._flags.new_tensor(self._host_sums.state(grads.values()) if can_share else ())
        rows = self._flags.new_zeros(len(self._weights), transport.size)
        for of_ranks, k in zip(rows, self._weights, strict=True):
            of_ranks[transport.rank] = factors[k].rows if k in factors else -1
        all_slots = range(len(self.layout.slots))
        small = {k: self._own_or_zeros(k) for k in all_slots if k not in like}
        _sum_each([self._flags, state, rows.view(-1), *small.values()], transport)
        counts = dict(zip(self._weights, rows.int().tolist(), strict=True))
        of_factors = {k: counts[k] for k in factors if min(counts[k]) >= 0}  # on all ranks
        grads = {
            k: grads[k] if k in grads else self._own_or_zeros(k)
            for k in like
            if k not in of_factors
        }
        products = gather_factors(factors, of_factors, transport)
        if can_share and self._host_sums.prepare(like, SumState.of(state), transport):
            large = self._host_sums.sum(grads, products, transport)
        else:
            _sum_each([*grads.values()], transport)
            large = grads | multiply_and_gather(products, like, transport)
        self._totals = small | large

    def _own_factors(self) -> dict[int, Factors]:
        """By its slot, each gradient of this rank that is nothing but factors. One that it lacks
        has no rows."""
        found = {}
        for k in self._weights:
            index = self.layout.slots[k].index
            if index not in self.filled:
                found[k] = no_factors(self._parameter_or_zeros(k))
            elif index in self._factors and self._dense_grad(index) is None:
                found[k] = self._factors[index]
        return found

    def last_small_grad(self) -> Tensor | None:
        for slot in self._last_slots:
            if (factors := self._factors.get(slot.index)) is not None:
                return factors.output_grads.sum() * factors.inputs.sum()  # as finite as the product
            if slot.index in self.filled:
                return self.own_grad(slot.index)
        return None

    def own_grad(self, index: int) -> Tensor:
        factors = self._factors.pop(index, None)
        grad = self._dense_grad(index)
        if factors is not None:
            product = factors.product()
            self._grads[index] = grad = product if grad is None else grad + product
        assert grad is not None
        return grad

    def _dense_grad(self, index: int) -> Tensor | None:
        """A gradient without what are factors."""
        grad = self._grads.get(index)
        return self._parameters[index].grad if grad is None else grad

    def reset(self) -> None:
        super().reset()
        self._grads, self._factors, self._totals = {}, {}, {}

    def _sums(self) -> tuple[Iterable[Tensor], Tensor]:
        return (self._totals[k] for k in range(len(self.layout.slots))), self._flags

    def _can_give(self, index: int, total: Tensor, parameter: Tensor) -> bool:
        return index in self._before or total.stride() == parameter.stride()

    def _own_or_zeros(self, k: int) -> Tensor:
        index = self.layout.slots[k].index
        if index in self.filled:
            return self.own_grad(index)
        return torch.zeros_like(self._parameter_or_zeros(k))

    def _parameter_or_zeros(self, k: int) -> Tensor:
        slot = self.layout.slots[k]
        parameter = self._parameters.get(slot.index)
        return self._trailer.new_zeros(slot.stop - slot.start) if parameter is None else parameter


def _sum_each(tensors: Sequence[Tensor], transport: Transport) -> None:
    """Sum each of these over the ranks, into itself. Collective."""
    if not tensors:
        return
    if tensors[0].is_complex():
        tensors = list(map(as_real, tensors))
    small = [tensor for tensor in tensors if tensor.nbytes <= _SMALL_BYTES]
    large = [tensor for tensor in tensors if tensor.nbytes > _SMALL_BYTES]
    packed = [flatten_dense_tensors(small)] if small else []
    transport.all_reduce_each([*packed, *large], "sum")
    if small:
        foreach_copy_(small, unflatten_dense_tensors(packed[0], small))


def _with_layout_of(parameter: Tensor, grad: Tensor) -> Tensor:
    """`grad`, or a copy of it, in the parameter's order in memory."""
    steps = zip(grad.shape, grad.stride(), parameter.stride(), strict=True)
    if all(size == 1 or mine == its for size, mine, its in steps):
        return grad
    return torch.empty_like(parameter).copy_(grad)
