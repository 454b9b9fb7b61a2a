"""The gradients of some parameters, from autograd until their sums are in `.grad`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.distributed.flight_record.recorder import recorder
from instep.training.buckets.checksum import (
    LENGTH,
    bucket_checksum,
    flags_and_checksum,
    verify_checksum,
)
from instep.training.buckets.layout import BucketLayout
from instep.training.buckets.weight_factors import Factors
from instep.training.errors import MixedSumsError

_LAST_COUNT = 4
"""Of so many parameters that backward reaches last, the smallest gradient shows what is not finite
(`last_small_grad`)."""


class GradBucket(ABC):
    """The gradients of some parameters.

    Beside each gradient travels a flag, 1 if this rank has that gradient. If no rank has it,
    `.grad` stays as it was, as in one process.
    """

    starts_early: bool
    """Whether it can be sent while backward still runs."""

    def __init__(
        self, layout: BucketLayout, parameters: Mapping[int, Tensor], ids: Sequence[int]
    ) -> None:
        self.layout = layout
        self.title = "gradients"
        """In the flight record."""
        self.ids = tuple(ids)
        self.filled: set[int] = set()
        """The indices whose gradient this rank has."""
        self._parameters = parameters
        self._last_slots = sorted(
            layout.slots[-_LAST_COUNT:], key=lambda slot: slot.stop - slot.start
        )
        """Of the last parameters, the smallest first."""
        self._step = 0
        self._like = next(iter(parameters.values())).new_empty(0)
        self._trailer = self._make_trailer()
        self._before: dict[int, Tensor | None] = {}
        """What `.grad` was, of parameters in whose `.grad` autograd leaves this rank's gradient."""

    def set_step(self, step: int) -> None:
        """Let it be summed with buckets of the same step only: a small number."""
        if step != self._step:
            self._step = step
            self._trailer = self._make_trailer()

    def _make_trailer(self) -> Tensor:
        checksum = bucket_checksum(self._like, *self.ids, step=self._step)
        return flags_and_checksum(len(self.layout.slots), checksum)

    @property
    def indices(self) -> list[int]:
        """The indices of its parameters, in its order."""
        return [slot.index for slot in self.layout.slots]

    @property
    def is_full(self) -> bool:
        """Whether this rank has all gradients."""
        return len(self.filled) == len(self.layout.slots)

    @abstractmethod
    def add(self, index: int, grad: Tensor) -> None:
        """Add a part of a gradient of which `.grad` has nothing."""

    @abstractmethod
    def add_accumulated(self, index: int) -> None:
        """Add what is in `.grad`, all of which is this rank's part of the sum."""

    @abstractmethod
    def intercept(self, index: int, grad: Tensor, partial: bool) -> None:
        """Add `grad`, which autograd is about to accumulate into `.grad`.

        `partial`: what is in `.grad` already is this rank's part of the same sum.
        """

    @abstractmethod
    def add_again(self, index: int, grad: Tensor) -> None:
        """Add another gradient of a parameter, after `intercept`, before `start`."""

    def add_factors(self, index: int, factors: Factors, ranks: int) -> bool:
        """Add a gradient of a weight as its factors, in a job of so many ranks; False where it is
        to come through `.grad`."""
        return False

    def separate(self, storages: set[int]) -> None:
        """Let each gradient have memory of its own, and none of `storages`; adds it to these.

        Where gradients are packed, each has.
        """
        return

    def start(self, transport: Transport) -> None:
        """Start the sum over the ranks, of a bucket whose gradients are separate. Collective."""
        with recorder.with_detail(self.title):
            self._start(transport)

    @abstractmethod
    def _start(self, transport: Transport) -> None:
        """As `start`."""

    def start_second_phase(self, transport: Transport) -> None:
        """Send what depends on the first sums, if anything does. Collective."""
        return

    @abstractmethod
    def own_grad(self, index: int) -> Tensor:
        """This rank's gradient of a parameter in `filled`, before `start`."""

    def own_grads(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters of which this rank has a gradient, and these, before `start`."""
        for index in self.indices:
            if index in self.filled and (parameter := self._parameters.get(index)) is not None:
                yield parameter, self.own_grad(index)

    def last_small_grad(self) -> Tensor | None:
        """This rank's smallest gradient of the last parameters, before `start`."""
        for slot in self._last_slots:
            if slot.index in self.filled:
                return self.own_grad(slot.index)
        return None

    def wait(self) -> None:
        """Wait for the sums.

        Raises MixedSumsError where another rank has sent another bucket (see `verify_checksum`).
        """
        verify_checksum(self._sums()[1][-LENGTH:], MixedSumsError.of_models())

    def write_grads(self, skip: Container[int] = ()) -> None:
        """Add the sums to `.grad`, except of the indices in `skip`."""
        totals, trailer = self._sums()
        # To read the flags waits for a GPU: only where this rank lacks a gradient, and once.
        flags = repeat(1.0) if self.is_full else trailer[:-LENGTH].real.tolist()
        for slot, total, flag in zip(self.layout.slots, totals, flags, strict=False):
            if flag and slot.index not in skip:
                self._write(slot.index, total)

    @abstractmethod
    def _sums(self) -> tuple[Iterable[Tensor], Tensor]:
        """The sums of the gradients, in the order of the slots, and the sum of the trailer."""

    @abstractmethod
    def _can_give(self, index: int, total: Tensor, parameter: Tensor) -> bool:
        """Whether `.grad` can be this very tensor."""

    def reset(self) -> None:
        """Forget this backward."""
        self.filled.clear()
        self._before.clear()

    def _write(self, index: int, total: Tensor) -> None:
        parameter = self._parameters.get(index)
        if parameter is None:
            return
        if index in self._before:
            parameter.grad = self._before[index]
        if total.shape != parameter.shape:
            total = total.view(parameter.shape)
        if parameter.grad is not None:
            parameter.grad.add_(total)
        elif self._can_give(index, total, parameter):
            parameter.grad = total.data  # no view to autograd: `p.grad.detach_()` must work
        else:  # in the parameter's own layout, as autograd's: fused optimizers rely on that
            parameter.grad = torch.empty_like(parameter).copy_(total)

    def _accumulated(self, index: int) -> Tensor:
        grad = self._parameters[index].grad
        assert grad is not None
        return grad
