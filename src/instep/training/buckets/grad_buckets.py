"""The gradients of one bucket on their way from autograd over all ranks into `.grad`.

Between CPU ranks of one host a gradient stays where autograd has put it, and is summed there: its
values pass through shared memory chunk by chunk, and nothing is packed. Elsewhere gradients are
packed into one flat tensor, which travels while backward goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.distributed.flight_record.recorder import recorder
from instep.distributed.identity import torch_devices
from instep.training.buckets.checksum import (
    LENGTH,
    bucket_checksum,
    flags_and_checksum,
    verify_checksum,
)
from instep.training.buckets.codec import BucketCodec, as_real
from instep.training.buckets.layout import BucketLayout
from instep.training.errors import MixedSumsError

_FEW = 4


def make_bucket(
    layout: BucketLayout,
    parameters: Mapping[int, Tensor],
    transport: Transport,
    ids: Sequence[int],
    codec: BucketCodec | None = None,
    *,
    grads_as_views: bool = False,
) -> GradBucket:
    """An empty bucket for the slots of `layout`.

    Args:
        parameters: by the indices of the slots. One that is gone is missing.
        transport: a bucket is packed unless `transport.in_place`.
        ids: equal on all ranks for the same bucket, and different for different buckets.
        codec: compresses what is sent. A bucket with a codec is always packed.
        grads_as_views: `.grad` becomes a view of the packed bucket, which is then allocated anew
            in each backward (as DDP's gradient_as_bucket_view).
    """
    if transport.in_place and codec is None:
        return _InPlaceBucket(layout, parameters, ids)
    return _PackedBucket(
        layout,
        parameters,
        ids,
        codec,
        starts_early=not transport.in_place,
        grads_as_views=grads_as_views,
    )


def separate(buckets: Iterable[GradBucket]) -> None:
    """Before these start: let each gradient have memory of its own. Two parameters that are added
    up have one gradient, and one may be a part of another tensor."""
    storages: set[int] = set()
    for bucket in buckets:
        bucket.separate(storages)


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
        checksum = bucket_checksum(self._like, *self.ids, self._step)
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

    def separate(self, storages: set[int]) -> None:
        """Let each gradient have memory of its own, and none of `storages`; adds it to these.

        Where gradients are packed, each has.
        """
        return

    def start(self, transport: Transport) -> None:
        """Start the sum over the ranks, of a bucket whose gradients are separate. Collective."""
        recorder.detail = self.title
        try:
            self._start(transport)
        finally:
            recorder.detail = ""

    @abstractmethod
    def _start(self, transport: Transport) -> None:
        """As `start`."""

    @abstractmethod
    def start_second_phase(self, transport: Transport) -> None:
        """Send what depends on the first sums, if anything does. Collective."""

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
        last = [slot for slot in self.layout.slots[-_FEW:] if slot.index in self.filled]
        if not last:
            return None
        return self.own_grad(min(last, key=lambda slot: slot.stop - slot.start).index)

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


class _InPlaceBucket(GradBucket):
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

    def add(self, index: int, grad: Tensor) -> None:
        if index in self.filled:
            grad = self._grads[index] + grad
        self._grads[index] = _with_layout_of(self._parameters[index], grad)
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

    def separate(self, storages: set[int]) -> None:
        for index in self.filled:
            grad = self.own_grad(index)
            storage = grad.untyped_storage()
            if storage.data_ptr() in storages or storage.nbytes() != grad.nbytes:
                self._grads[index] = grad.clone()
            storages.add(storage.data_ptr())

    def _start(self, transport: Transport) -> None:
        self._flags = self._trailer.clone()
        for k, slot in enumerate(self.layout.slots):
            if slot.index not in self.filled:
                self._totals.append(self._zeros(slot.index, slot.stop - slot.start))
                self._flags[k] = 0
                continue
            self._totals.append(self.own_grad(slot.index))
        tensors = [as_real(tensor) for tensor in (self._flags, *self._totals)]
        transport.all_reduce_each(tensors, "sum")

    def own_grad(self, index: int) -> Tensor:
        grad = self._grads.get(index)
        return self._accumulated(index) if grad is None else grad

    def start_second_phase(self, transport: Transport) -> None:
        return None

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


class _PackedBucket(GradBucket):
    """One flat tensor, which holds the gradients, the flags and the checksum."""

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Mapping[int, Tensor],
        ids: Sequence[int],
        codec: BucketCodec | None = None,
        *,
        starts_early: bool,
        grads_as_views: bool = False,
    ) -> None:
        super().__init__(layout, parameters, ids)
        self.starts_early = starts_early
        self._codec = codec or BucketCodec()
        self._grads_as_views = grads_as_views
        self._slot_of = {slot.index: slot for slot in layout.slots}
        self._flat: Tensor | None = None
        self._streams = torch_devices.StreamSet(self._trailer.device.type)

    def add(self, index: int, grad: Tensor) -> None:
        part = self._part(index).view(grad.shape)
        if index in self.filled:
            self._streams.join()
            part.add_(grad)
        else:
            part.copy_(grad)
            self.filled.add(index)
        self._streams.add()

    def add_accumulated(self, index: int) -> None:
        self.add(index, self._accumulated(index))
        self._before[index] = None

    def intercept(self, index: int, grad: Tensor, partial: bool) -> None:
        parameter = self._parameters[index]
        self.add(index, grad)
        self._before[index] = None
        if parameter.grad is not None:
            if partial:
                self.add(index, parameter.grad)
            else:
                self._before[index] = parameter.grad
            parameter.grad = None

    def _start(self, transport: Transport) -> None:
        self._streams.join()
        flags = self._allocated()[self.layout.numel :].copy_(self._trailer)
        for k, index in enumerate(self._slot_of):
            if index not in self.filled:
                self._part(index).zero_()
                flags[k] = 0
        self._codec.start(self._allocated(), transport)

    def own_grad(self, index: int) -> Tensor:
        self._streams.join()
        return self._part(index)

    def start_second_phase(self, transport: Transport) -> None:
        self._codec.start_second_phase(self._allocated(), transport)

    def wait(self) -> None:
        self._codec.wait(self._allocated())
        super().wait()

    def reset(self) -> None:
        super().reset()
        self._codec.reset()
        self._streams.clear()
        if self._grads_as_views:
            self._flat = None

    def _sums(self) -> tuple[Iterable[Tensor], Tensor]:
        return map(self._part, self._slot_of), self._allocated()[self.layout.numel :]

    def _can_give(self, index: int, total: Tensor, parameter: Tensor) -> bool:
        return self._grads_as_views and total.stride() == parameter.stride()

    def _allocated(self) -> Tensor:
        if self._flat is None:
            self._flat = self._trailer.new_empty(self.layout.numel + len(self._trailer))
        return self._flat

    def _part(self, index: int) -> Tensor:
        slot = self._slot_of[index]
        return self._allocated()[slot.start : slot.stop]


def _with_layout_of(parameter: Tensor, grad: Tensor) -> Tensor:
    """`grad`, or a copy of it, in the parameter's order in memory."""
    if grad.is_contiguous() and parameter.is_contiguous():
        return grad
    steps = zip(grad.shape, grad.stride(), parameter.stride(), strict=True)
    if all(size == 1 or mine == its for size, mine, its in steps):
        return grad
    return torch.empty_like(parameter).copy_(grad)
