"""What happens to the gradients of one bucket, by how tensors travel best.

Between CPU ranks of one host a gradient stays where autograd has put it, and is summed there: its
values pass through the shared mapping chunk by chunk, and nothing is packed. Elsewhere gradients
are packed into one flat tensor, which travels while backward goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

import torch
from torch import Tensor, nn

from instep.distributed.communication.transport import Pending, Transport
from instep.training.buckets.checksum import LENGTH, all_present, check, mark
from instep.training.buckets.layout import Bucket
from instep.training.errors import MixedSumsError


class Cargo(Protocol):
    """The gradients of one bucket, from autograd's hands into `.grad`.

    Beside the gradients travels one number per slot, "this rank has it": what no rank has keeps
    `.grad` as it was, as in one process. Behind these is the bucket's mark.
    """

    parameters: Mapping[int, nn.Parameter]
    """Those in the bucket, by index."""
    filled: set[int]
    """Of which of them this rank has a gradient."""

    @property
    def full(self) -> bool:
        """Whether it can travel already, while backward still runs."""

    def take(self, index: int, grad: Tensor, partial: bool) -> None:
        """Autograd is about to add `grad` to `.grad`.

        What is there belongs to the sum that is made now if it is `partial`, else to the past.
        """

    def take_kept(self, index: int) -> None:
        """There is a partial `.grad`, and this backward did not come by."""

    def launch(self, way: Transport) -> None:
        """Start to sum over the ranks. Collective."""

    def follow(self, way: Transport) -> None:
        """Start what can be sent only when the first sums are there, if anything. Collective."""

    def deliver(self, elsewhere: Set[int]) -> None:
        """Wait, and put the sums into `.grad`, but for the parameters that are dealt with.

        Raises MixedSumsError where another rank has sent another bucket (see `marks.check`).
        """

    def reset(self) -> None:
        """Forget this backward."""


class Wire(Protocol):
    """How one flat tensor travels, which is to become its sum over the ranks.

    Its last elements are what the cargo adds: "this rank has it", for each slot, and a mark.
    """

    def launch(self, flat: Tensor, way: Transport) -> None:
        """Start. Collective."""

    def follow(self, flat: Tensor, way: Transport) -> None:
        """Start what can be sent only when the first sums are there, if anything. Collective."""

    def arrive(self, flat: Tensor) -> None:
        """Wait, and leave the sums in `flat`."""

    def reset(self) -> None:
        """Forget this backward, which may have been interrupted."""


def load(
    plan: Bucket,
    parameters: Mapping[int, nn.Parameter],
    way: Transport,
    wire: Wire | None,
    number: int,
) -> Cargo:
    """An empty cargo for the slots of `plan`, whose indices are those of `parameters`.

    With a `wire` it is packed in any case. `number` tells models apart.
    """
    in_bucket = {slot.index: parameters[slot.index] for slot in plan.slots}
    own = mark(next(iter(in_bucket.values())), number, *in_bucket)
    if way.in_place and wire is None:
        return _InPlace(in_bucket, own)
    return _Packed(plan, in_bucket, own, wire or Whole())


class _InPlace:
    """Gradients stay where they are; the caller itself sums them, when backward has ended."""

    full = False  # the last gradient comes into `.grad` only after its hook

    def __init__(self, parameters: Mapping[int, nn.Parameter], mark: Tensor) -> None:
        self.parameters = parameters
        self._full = all_present(len(parameters), mark)
        self._before: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._has = torch.empty(0)
        self.filled: set[int] = set()

    def take(self, index: int, grad: Tensor, partial: bool) -> None:
        parameter = self.parameters[index]
        if parameter.grad is not None and not partial:
            self._before[index] = parameter.grad
            parameter.grad = None
        self.filled.add(index)

    def take_kept(self, index: int) -> None:
        self.filled.add(index)

    def launch(self, way: Transport) -> None:
        self._has = self._full.clone()
        taken: set[int] = set()
        for k, (index, parameter) in enumerate(self.parameters.items()):
            if index not in self.filled:
                self._sums[index] = torch.zeros_like(parameter)
                self._has[k] = 0
                continue
            grad = _present(parameter)
            memory = grad.untyped_storage().data_ptr()
            # Backward of a view of a parameter may leave one memory in two gradients.
            self._sums[index] = grad.clone() if memory in taken else grad
            taken.add(memory)
        travelling = [real(tensor) for tensor in (self._has, *self._sums.values())]
        way.all_reduce_each(travelling, "sum")

    def follow(self, way: Transport) -> None:
        return None

    def deliver(self, elsewhere: Set[int]) -> None:
        check(self._has[-LENGTH:], MixedSumsError.of_models())
        held = self._has[:-LENGTH].real.tolist()
        for (index, total), ranks in zip(self._sums.items(), held, strict=True):
            if index in elsewhere or not ranks:
                continue
            parameter = self.parameters[index]
            before = self._before.get(index)
            if before is None and index not in self.filled:
                before = parameter.grad
            parameter.grad = total if before is None else before.add_(total)

    def reset(self) -> None:
        self.filled.clear()
        self._before.clear()
        self._sums = {}


def _present(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class _Packed:
    """One flat tensor travels; behind the gradients lies "this rank has it", and the mark."""

    def __init__(
        self, plan: Bucket, parameters: Mapping[int, nn.Parameter], mark: Tensor, wire: Wire
    ) -> None:
        self.parameters = parameters
        self._wire = wire
        self._slots = {slot.index: slot for slot in plan.slots}
        self._full = all_present(len(plan.slots), mark)
        self._flat = mark.new_zeros(plan.numel + len(self._full))
        self._has = self._flat[plan.numel :]
        self._before: dict[int, Tensor] = {}
        self.filled: set[int] = set()

    @property
    def full(self) -> bool:
        return len(self.filled) == len(self._slots)

    def take(self, index: int, grad: Tensor, partial: bool) -> None:
        parameter, place = self.parameters[index], self._place(index)
        place.copy_(grad)
        if parameter.grad is not None:
            if partial:
                place.add_(parameter.grad)
            else:
                self._before[index] = parameter.grad
            parameter.grad = None
        self.filled.add(index)

    def take_kept(self, index: int) -> None:
        self._place(index).copy_(_present(self.parameters[index]))
        self.filled.add(index)

    def launch(self, way: Transport) -> None:
        self._has.copy_(self._full)
        for k, index in enumerate(self._slots):
            if index not in self.filled:
                self._place(index).zero_()
                self._has[k] = 0
        self._wire.launch(self._flat, way)

    def follow(self, way: Transport) -> None:
        self._wire.follow(self._flat, way)

    def deliver(self, elsewhere: Set[int]) -> None:
        self._wire.arrive(self._flat)
        check(self._has[-LENGTH:], MixedSumsError.of_models())
        # Asking a GPU means to wait for it: only about what this rank has not, and once.
        held = [1.0] * len(self._slots) if self.full else self._has[:-LENGTH].real.tolist()
        for index, ranks in zip(self._slots, held, strict=True):
            if ranks and index not in elsewhere:
                self._deliver(index)

    def reset(self) -> None:
        self.filled.clear()
        self._before.clear()
        self._wire.reset()

    def _place(self, index: int) -> Tensor:
        slot = self._slots[index]
        return self._flat[slot.start : slot.stop].view(self.parameters[index].shape)

    def _deliver(self, index: int) -> None:
        parameter, total = self.parameters[index], self._place(index)
        before = self._before.get(index)
        if before is not None:
            parameter.grad = before.add_(total)
        elif parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(total)
        elif index not in self.filled:
            parameter.grad.add_(total)
        else:
            parameter.grad.copy_(total)


class Whole:
    """The flat tensor travels as it is."""

    def __init__(self) -> None:
        self._pending: Pending | None = None

    def launch(self, flat: Tensor, way: Transport) -> None:
        """Start the sum."""
        self._pending = way.all_reduce(real(flat), "sum")

    def follow(self, flat: Tensor, way: Transport) -> None:
        """Nothing."""

    def arrive(self, flat: Tensor) -> None:
        """Wait for the sum."""
        assert self._pending is not None
        self._pending.wait()

    def reset(self) -> None:
        """Let go of the sum."""
        self._pending = None


def real(tensor: Tensor) -> Tensor:
    """The same memory without complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
