"""Reduction of the values of several ranks, along a fixed binary tree over the ranks.

The tree depends only on the number of ranks, so a sum has the same bits on every rank and
in every run. For 6 ranks it is ((0+1)+(2+3))+(4+5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_ALL = _FLOATS | _INTEGERS


@dataclass(frozen=True)
class Reduction:
    """An element-wise reduction of two tensors of the same dtype and size."""

    name: str
    """The name of the ReduceOp."""
    combine: Callable[..., Tensor]
    """A torch function (left, right, *, out)."""
    dtypes: frozenset[torch.dtype]
    """Those that Gloo supports; others are left to Gloo, which raises the error."""
    is_mean: bool = False
    """Whether the result is divided by the number of ranks."""


_REDUCTIONS = {
    op.value: Reduction(op.name, combine, dtypes, op == ReduceOp.AVG)
    for op, combine, dtypes in (
        (ReduceOp.SUM, torch.add, _ALL | _COMPLEX),
        (ReduceOp.AVG, torch.add, _FLOATS),
        (ReduceOp.PRODUCT, torch.mul, _ALL),
        (ReduceOp.MIN, torch.minimum, _ALL),
        (ReduceOp.MAX, torch.maximum, _ALL),
        (ReduceOp.BAND, torch.bitwise_and, _INTEGERS),
        (ReduceOp.BOR, torch.bitwise_or, _INTEGERS),
        (ReduceOp.BXOR, torch.bitwise_xor, _INTEGERS),
    )
}


def find_reduction(op: ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction | None:
    """The reduction `op` for tensors of `dtype`, or None to leave it to Gloo."""
    reduction = _REDUCTIONS.get(op.value)
    return reduction if reduction is not None and dtype in reduction.dtypes else None


def buffer_count(ranks: int) -> int:
    """The number of buffers that `reduce_into` needs for that many ranks."""
    return max(0, (ranks - 1).bit_length() - 1)


def reduce_into(
    out: Tensor, parts: Sequence[Tensor], reduction: Reduction, buffers: Sequence[Tensor]
) -> None:
    """Write the reduction of `parts`, one per rank, to `out`; all 1-D, equal dtype and size.

    `parts` are only read. `out` must be none of them, except for two ranks, where it may be either.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
    elif (
        out.dtype in _HALVES
        and reduction.combine is torch.add
        and (len(parts) > 2 or reduction.is_mean)
    ):
        total = parts[0].float()  # rounded once, and a mean does not overflow where no value does
        for part in parts[1:]:
            total += part
        out.copy_(total.div_(len(parts)) if reduction.is_mean else total)
        return
    else:
        _branch(parts, reduction.combine, out, buffers)
    if reduction.is_mean:
        out.div_(len(parts))


def _branch(
    parts: Sequence[Tensor], combine: Callable[..., Tensor], out: Tensor, buffers: Sequence[Tensor]
) -> Tensor:
    """The reduction of a subtree: `out`, or the leaf itself."""
    count = len(parts)
    if count == 1:
        return parts[0]
    if count == 2:
        return combine(parts[0], parts[1], out=out)
    middle = 1 << (count - 1).bit_length() - 1
    left = _branch(parts[:middle], combine, out, buffers)
    right = _branch(parts[middle:], combine, buffers[0], buffers[1:])
    return combine(left, right, out=out)
