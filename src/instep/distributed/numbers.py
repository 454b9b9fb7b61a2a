"""Collectives of a few numbers: on CPUs in arrays of NumPy, whose small operations take a third of
the time that torch's take between the layers of a model, or for functions in C in bytes, which take
a third of that.

No array shares memory with a tensor of the script: PyTorch could not resize that any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from instep.distributed.pending import Pending

Numbers: TypeAlias = NDArray[np.float64] | Tensor
"""Of float64: an array, or a tensor on an accelerator."""
Doubles: TypeAlias = bytes
"""The bytes of numbers of float64."""

_OF_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


class NumbersTransport(Protocol):
    """The part of a Transport that they need; `all_gather_bytes`, where it has that, is faster."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor."""

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """Start to reduce `tensor` into itself."""


class FlagsTransport(Protocol):
    """The part of a Transport that a question to all ranks needs."""

    control_device: torch.device

    def all_reduce(self, tensor: Tensor, op: str) -> Pending:
        """Start to reduce `tensor` into itself."""


class ValuesTransport(NumbersTransport, FlagsTransport, Protocol):
    """The part of a Transport that `gather_values` needs."""


def join(tensors: Sequence[Tensor], *others: float) -> Numbers:
    """1-D tensors, which need no gradient, and some more numbers, one after the other."""
    if tensors[0].is_cpu:
        return np.concatenate((_to_array(torch.cat(list(tensors))), others), dtype=np.float64)
    more = [tensors[0].new_full((1,), other, dtype=torch.float64) for other in others]
    return torch.cat((*tensors, *more)).double()


def concatenate(parts: Sequence[Numbers]) -> Numbers:
    """Numbers, one after the other."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return torch.cat(tensors) if tensors else np.concatenate(parts)


def zeros(count: int, like: Tensor) -> Numbers:
    """So many zeros, on the device of `like`."""
    return np.zeros(count) if like.is_cpu else like.new_zeros(count, dtype=torch.float64)


def to_tensor(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    """`numbers` as a tensor of this dtype; it may share the memory."""
    if isinstance(numbers, Tensor):
        return numbers.to(dtype)
    if dtype in _OF_NUMPY:
        return torch.from_numpy(numbers.astype(_OF_NUMPY[dtype], copy=False))
    return torch.from_numpy(numbers).to(dtype)


def from_tensor(tensor: Tensor) -> Numbers:
    """The values of a 1-D tensor, which are only read."""
    if not tensor.is_cpu:
        return tensor.detach().double()
    return tensor.detach().to(torch.float64, copy=True).numpy()


def _to_array(tensor: Tensor) -> NDArray[Any]:
    """Without a copy, unless NumPy has no such numbers."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def gather(numbers: Numbers, transport: NumbersTransport) -> Numbers:
    """Every rank's numbers, in rows. Collective."""
    if isinstance(numbers, Tensor):
        return torch.stack(transport.all_gather(numbers))
    if all_gather_bytes := getattr(transport, "all_gather_bytes", None):
        gathered = np.frombuffer(all_gather_bytes(numbers.tobytes()))
        return gathered.reshape(transport.size, len(numbers))
    return torch.stack(transport.all_gather(torch.from_numpy(numbers))).numpy()


def gather_doubles(mine: Doubles, transport: NumbersTransport) -> Doubles:
    """Every rank's numbers, one rank's after another's. Collective."""
    if all_gather_bytes := getattr(transport, "all_gather_bytes", None):
        gathered: Doubles = all_gather_bytes(mine)
        return gathered
    return torch.cat(transport.all_gather(_tensor_of(mine))).numpy().tobytes()


def gather_values(values: Sequence[float], transport: ValuesTransport) -> list[list[float]]:
    """Every rank's values, in rows. Collective."""
    mine = torch.tensor(values, dtype=torch.float64, device=transport.control_device)
    rows: list[list[float]] = gather(from_tensor(mine), transport).tolist()
    return rows


def sum_over_ranks(numbers: Numbers, transport: NumbersTransport) -> Numbers:
    """The sum of every rank's numbers, which it may overwrite. Collective."""
    if hasattr(transport, "all_gather_bytes"):
        return gather(numbers, transport).sum(0)
    tensor = numbers if isinstance(numbers, Tensor) else torch.from_numpy(numbers)
    transport.all_reduce(tensor, "sum").wait()
    return numbers


def terms_over_ranks(mine: Doubles, transport: NumbersTransport) -> Doubles:
    """Terms of the sum of every rank's numbers, one after another: one or several. Collective."""
    if all_gather_bytes := getattr(transport, "all_gather_bytes", None):
        gathered: Doubles = all_gather_bytes(mine)
        return gathered
    tensor = _tensor_of(mine)
    transport.all_reduce(tensor, "sum").wait()
    return tensor.numpy().tobytes()


def on_any_rank(condition: bool, transport: FlagsTransport) -> bool:
    """Whether it is true on one rank or more. Collective."""
    return each_on_any_rank([condition], transport)[0]


def on_all_ranks(condition: bool, transport: FlagsTransport) -> bool:
    """Whether it is true on every rank. Collective."""
    return not on_any_rank(not condition, transport)


def each_on_any_rank(conditions: Sequence[bool], transport: FlagsTransport) -> list[bool]:
    """For each, whether it is true on one rank or more. Collective."""
    flags = torch.tensor(conditions, dtype=torch.int32, device=transport.control_device)
    transport.all_reduce(flags, "max").wait()
    return [bool(flag) for flag in flags.tolist()]


def _tensor_of(doubles: Doubles) -> Tensor:
    return torch.frombuffer(bytearray(doubles), dtype=torch.float64)
