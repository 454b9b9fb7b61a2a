"""Which elements of which parameter each rank updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from instep.distributed.communication.tensors import is_dense
from instep.training.errors import CannotShardError

_ALIGNMENT = 64
"""In elements. Fused kernels round the elements beyond the last whole vector otherwise; so the
same elements of a parameter are beyond it, however it is cut."""


@dataclass(frozen=True, eq=False)
class Part:
    """Elements of a parameter, counted in the order of its memory, that one rank updates."""

    parameter: Tensor
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return self.stop - self.start

    @property
    def address(self) -> int:
        """Where the first of them is in memory."""
        return self.parameter.data_ptr() + self.start * self.parameter.element_size()

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements of the parameter."""
        return self.numel == self.parameter.numel()

    def view(self, tensor: Tensor) -> Tensor:
        """This range's elements of `tensor`, which has the strides of the parameter; 1-D."""
        return flatten(tensor)[self.start : self.stop]


def flatten(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in the order of its memory, as a 1-D view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def check_dense(parameter: Tensor) -> None:
    """Raise CannotShardError for a parameter whose elements are not one piece of memory."""
    if not is_dense(parameter):
        raise CannotShardError(
            f"a parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} "
            "is not one piece of memory, which instep.shard(optimizer) needs; make it "
            "contiguous."
        )


def divide_elements(parameters: Sequence[Tensor], size: int) -> list[list[Part]]:
    """For each of `size` ranks, its parts: 1/size of all elements, up to _ALIGNMENT.

    Parameters without elements are rank 0's: they have a state, too.
    """
    total = sum(parameter.numel() for parameter in parameters)
    ranks: list[list[Part]] = []
    for rank in range(size):
        first, last = rank * total // size, (rank + 1) * total // size
        parts, begin = [], 0
        for parameter in parameters:
            start, stop = (_cut(edge - begin, parameter.numel()) for edge in (first, last))
            if start < stop or (rank == 0 and not parameter.numel()):
                parts.append(Part(parameter, start, stop))
            begin += parameter.numel()
        ranks.append(parts)
    return ranks


def _cut(position: int, numel: int) -> int:
    """Where a parameter is cut: at the position, or before it at a multiple of _ALIGNMENT."""
    return numel if position >= numel else max(position, 0) // _ALIGNMENT * _ALIGNMENT


def divide_parameters(parameters: Sequence[Tensor], size: int) -> list[list[Part]]:
    """For each of `size` ranks, whole parameters: the largest first, to whom has the least."""
    ranks: list[list[Part]] = [[] for _ in range(size)]
    loads = [0] * size
    for parameter in sorted(parameters, key=lambda each: -each.numel()):
        rank = loads.index(min(loads))
        ranks[rank].append(Part(parameter, 0, parameter.numel()))
        loads[rank] += parameter.numel()
    return ranks
