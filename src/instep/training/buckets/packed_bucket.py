"""A bucket of gradients packed into one flat tensor, which travels while backward goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.distributed.identity import torch_devices
from instep.training.buckets.codec import BucketCodec
from instep.training.buckets.grad_bucket import GradBucket
from instep.training.buckets.layout import BucketLayout


class PackedBucket(GradBucket):
    """One flat tensor, which holds the gradients, the flags and the checksum."""

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Mapping[int, Tensor],
        ids: Sequence[int],
        codec: BucketCodec | None,
        *,
        starts_early: bool,
        grads_as_views: bool,
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

    def add_again(self, index: int, grad: Tensor) -> None:
        self.add(index, grad)

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
