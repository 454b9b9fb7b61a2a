"""What this rank's rows add to the gradients of one bucket's parameters, on the way to `.grad`.

Like `instep.training.buckets.grad_buckets`, but what arrives is a part of a gradient: the rest,
which the script computes outside of divided calls, comes into `.grad` by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from instep.distributed.communication.transport import Pending, Transport
from instep.training.buckets.checksum import LENGTH, all_present, check, mark
from instep.training.buckets.grad_buckets import real
from instep.training.buckets.layout import Bucket
from instep.training.errors import MixedSumsError

_count = count()


class Cargo(Protocol):
    """The parameters of one bucket, and what this rank's rows add to their gradients.

    Beside the gradients travels one number per parameter, "this rank has it": what no rank has
    keeps `.grad` as it was. Behind these is the bucket's mark.
    """

    order: int
    """Which message leaves first, of one call's."""
    expected: int
    """How many divided calls of this backward have not brought their part yet."""
    early: bool
    """Whether it can leave while backward still runs."""

    def add(self, place: int, grad: Tensor) -> None:
        """Take a part of a parameter's gradient."""

    def launch(self, way: Transport) -> None:
        """Start to sum over the ranks. Collective."""

    def deliver(self) -> None:
        """Wait for the sums and add them to `.grad`.

        Raises MixedSumsError where another rank has sent another bucket (see `marks.check`).
        """

    def reset(self) -> None:
        """Forget this backward."""


def load(plan: Bucket, parameters: Sequence[Tensor], way: Transport) -> Cargo:
    """An empty cargo for the slots of `plan`, in their order."""
    return (_InPlace if way.in_place else _Packed)(plan, parameters)


class _Bucket:
    """What both kinds of cargo have in common."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.order = next(_count)
        self.expected = 0
        self._parameters = [TensorWeakRef(parameter) for parameter in parameters]
        self._like = parameters[0].new_empty(0)
        self._full = all_present(len(parameters), mark(self._like, self.order))
        """What travels behind the gradients where this rank has all of them."""

    def _add_to_grad(self, place: int, total: Tensor) -> None:
        parameter = self._parameters[place]()
        if parameter is None:
            return
        if total.shape != parameter.shape:
            total = total.view(parameter.shape)
        if parameter.grad is not None:
            parameter.grad.add_(total)
        elif total.stride() == parameter.stride():
            parameter.grad = total
        else:  # in the parameter's own order, as autograd has it: fused optimizers rely on that
            parameter.grad = torch.empty_like(parameter).copy_(total)


class _InPlace(_Bucket):
    """Gradients are summed where autograd has put them, by the caller."""

    early = False  # what is before the parameter may wait for the very same gradient

    def __init__(self, plan: Bucket, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters)
        self._sizes = [slot.stop - slot.start for slot in plan.slots]
        self._grads: dict[int, Tensor] = {}
        self._totals: list[Tensor] = []
        self._has = self._like

    def add(self, place: int, grad: Tensor) -> None:
        if place in self._grads:
            self._grads[place] = self._grads[place] + grad
        else:
            self._grads[place] = grad

    def launch(self, way: Transport) -> None:
        self._has = self._full.clone()
        seen: set[int] = set()  # two parameters that are added up have one gradient
        for place, size in enumerate(self._sizes):
            grad = self._grads.get(place)
            if grad is None:
                grad = self._like.new_zeros(size)
                self._has[place] = 0
            if not _is_own(grad) or grad.untyped_storage().data_ptr() in seen:
                grad = grad.clone(memory_format=torch.contiguous_format)
            seen.add(grad.untyped_storage().data_ptr())
            self._totals.append(grad)
        way.all_reduce_each([real(t) for t in (self._has, *self._totals)], "sum")

    def deliver(self) -> None:
        check(self._has[-LENGTH:], MixedSumsError.of_models())
        for place, ranks in enumerate(self._has[:-LENGTH].real.tolist()):
            if ranks:
                self._add_to_grad(place, self._totals[place])

    def reset(self) -> None:
        self.expected = 0
        self._grads, self._totals = {}, []


class _Packed(_Bucket):
    """One flat tensor travels while backward goes on; `.grad` becomes a part of it."""

    early = True

    def __init__(self, plan: Bucket, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters)
        self._plan = plan
        self._flat = self._like
        self._filled: set[int] = set()
        self._pending: Pending | None = None

    def add(self, place: int, grad: Tensor) -> None:
        part = self._part(place).view(grad.shape)
        if place in self._filled:
            part.add_(grad)
        else:
            part.copy_(grad)
            self._filled.add(place)

    def launch(self, way: Transport) -> None:
        missing = [k for k in range(len(self._plan.slots)) if k not in self._filled]
        for place in missing:
            self._part(place).zero_()
        has = self._flat[self._plan.numel :].copy_(self._full)
        for place in missing:
            has[place] = 0
        self._pending = way.all_reduce(real(self._flat), "sum")

    def deliver(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        check(self._flat[-LENGTH:], MixedSumsError.of_models())
        # Asking a GPU means to wait for it: only about what this rank has not, and once.
        count = len(self._plan.slots)
        full = len(self._filled) == count
        held = [1.0] * count if full else self._flat[-LENGTH - count : -LENGTH].real.tolist()
        for place, ranks in enumerate(held):
            if ranks:
                self._add_to_grad(place, self._part(place))

    def reset(self) -> None:
        self.expected = 0
        self._flat = self._like  # what was delivered keeps the memory
        self._pending = None
        self._filled.clear()

    def _part(self, place: int) -> Tensor:
        if not self._flat.numel():
            self._flat = self._like.new_empty(self._plan.numel + len(self._full))
        slot = self._plan.slots[place]
        return self._flat[slot.start : slot.stop]


def _is_own(grad: Tensor) -> bool:
    """Whether this can be changed: it is no part of another tensor, such as the gradient of the
    whole batch's outputs."""
    return grad.is_contiguous() and grad.untyped_storage().nbytes() == grad.nbytes
