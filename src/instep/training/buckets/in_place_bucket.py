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

_SMALL_BYTES = 16 << 10
"""Gradients of up to this many are packed for the sum: to sum each by itself takes longer."""


class InPlaceBucket(GradBucket):
    """Gradients stay where they are; the caller's thread sums them when backward has ended.

    All ranks lay them out in memory as the parameter is.
    """

    # Autograd puts the last gradient into `.grad` only after its hook. And a gradient that was
    # handed over may still be needed for what is before the parameter.
    starts_early = False

    def __init__(
        self, layout: BucketLayout, parameters: Mapping[int, Tensor], ids: Sequence[int]
    ) -> None:
        super().__init__(layout, parameters, ids)
        self._grads: dict[int, Tensor] = {}
        self._totals: list[Tensor] = []
        self._flags = self._trailer
        self._host_sums = HostSums()
        self._large = {
            k: None
            for k, slot in enumerate(layout.slots)
            if (parameter := parameters[slot.index]).nbytes > _SMALL_BYTES
            and parameter.is_contiguous()
        }
        """Which slots have sums of which the host may keep one copy."""

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

    def separate(self, storages: set[int]) -> None:
        for index, grad in self._filled_grads().items():
            storage = grad.untyped_storage()
            pointer = storage.data_ptr()
            if pointer in storages or storage.nbytes() != grad.nbytes:
                self._grads[index] = grad.clone()
            storages.add(pointer)

    def _start(self, transport: Transport) -> None:
        self._flags = self._trailer.clone()
        own = self._filled_grads()
        for k, slot in enumerate(self.layout.slots):
            if slot.index in own:
                self._totals.append(own[slot.index])
            else:
                self._totals.append(self._zeros(slot.index, slot.stop - slot.start))
                self._flags[k] = 0
        grads = [self._totals[k] for k in self._large]
        if not self._host_sums.can_begin(grads, transport):
            _sum_each([self._flags, *self._totals], transport)
            return
        flags = self._flags.new_tensor(self._host_sums.state(grads))
        others = [total for k, total in enumerate(self._totals) if k not in self._large]
        _sum_each([self._flags, flags, *others], transport)
        state = SumState(*map(bool, flags.tolist()))
        sums = self._host_sums.sum(grads, state, transport)
        if sums is None:
            _sum_each(grads, transport)
            return
        for k, total in zip(self._large, sums, strict=True):
            self._totals[k] = total

    def own_grad(self, index: int) -> Tensor:
        grad = self._grads.get(index)
        return self._accumulated(index) if grad is None else grad

    def _filled_grads(self) -> dict[int, Tensor]:
        missing = [index for index in self.filled if index not in self._grads]
        return {**self._grads, **{index: self._accumulated(index) for index in missing}}

    def reset(self) -> None:
        super().reset()
        self._grads, self._totals = {}, []

    def _sums(self) -> tuple[Iterable[Tensor], Tensor]:
        return self._totals, self._flags

    def _can_give(self, index: int, total: Tensor, parameter: Tensor) -> bool:
        return index in self._before or total.stride() == parameter.stride()

    def _zeros(self, index: int, numel: int) -> Tensor:
        parameter = self._parameters.get(index)
        return self._trailer.new_zeros(numel) if parameter is None else torch.zeros_like(parameter)


def _sum_each(tensors: Sequence[Tensor], transport: Transport) -> None:
    """Sum each of these over the ranks, into itself. Collective."""
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
