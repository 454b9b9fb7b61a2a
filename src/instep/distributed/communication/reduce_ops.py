"""The meaning of each reduction for each dtype (pure, no communication).

Tensors are sent in a reduce dtype in which the sum over ranks is that of one process: integers of
less than 64 bits as int64, half precision as float32. The result is then converted back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from instep.distributed.communication.errors import (
    OverflowedError,
    UnknownOpError,
    UnsuitableTensorError,
)

OPS = ("sum", "mean", "min", "max", "product")
_SYNONYMS = {"avg": "mean", "prod": "product"}
"""Names of torch.distributed.ReduceOp and of torch's functions."""

_NARROW = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32)
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_SIGN_BIT = -(2**63)

_COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "product": lambda stack: stack.prod(0),
}


def check_op(op: str, dtype: torch.dtype) -> str:
    """The name in OPS of this reduction.

    Raises UnknownOpError, or UnsuitableTensorError where `op` has no meaning for `dtype`.
    """
    op = _SYNONYMS.get(op, op)
    if op not in OPS:
        raise UnknownOpError(op, OPS)
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UnsuitableTensorError(
            f"the mean of {dtype} is no {dtype}; use op='sum', or convert it first."
        )
    if op in ("min", "max") and dtype.is_complex:
        raise UnsuitableTensorError(
            f"{dtype} has no order, so no min or max; reduce its abs() or its real part."
        )
    return op


def reduce_dtype_op(op: str, dtype: torch.dtype) -> str:
    """The op on tensors of the reduce dtype. For bool, sum is their max and product their min."""
    if dtype is torch.bool:
        return {"sum": "max", "product": "min"}.get(op, op)
    return "sum" if op == "mean" else op


def to_reduce_dtype(tensor: Tensor, op: str) -> Tensor:
    """`tensor` in its reduce dtype; differentiable. May be `tensor` itself."""
    dtype = tensor.dtype
    if dtype is torch.bool:
        return tensor.to(torch.uint8)
    if dtype in _NARROW:
        return tensor.to(torch.int64)
    if dtype is torch.uint64:  # sums and products wrap alike; order needs the first bit flipped
        signed = tensor.view(torch.int64)
        return signed ^ _SIGN_BIT if op in ("min", "max") else signed
    if dtype in _WIDE or dtype is torch.int64:
        return tensor
    return tensor.to(torch.complex64 if dtype.is_complex else torch.float32)


def from_reduce_dtype(reduced: Tensor, dtype: torch.dtype, op: str, size: int) -> Tensor:
    """The reduction over `size` ranks in the user's `dtype`; differentiable.

    Raises OverflowedError where it does not fit a narrow integer.
    """
    if op == "mean":
        reduced = reduced / size
    if dtype in _NARROW and op in ("sum", "product"):
        _check_fits(reduced, dtype, op)
    if dtype is torch.uint64:
        signed = reduced ^ _SIGN_BIT if op in ("min", "max") else reduced
        return signed.view(torch.uint64)
    return reduced.to(dtype)


def reduce_parts(parts: list[Tensor], op: str) -> Tensor:
    """The reduction of tensors of one shape that this rank holds; differentiable."""
    dtype = parts[0].dtype
    stack = torch.stack([to_reduce_dtype(part, op) for part in parts])
    return from_reduce_dtype(_COMBINE[reduce_dtype_op(op, dtype)](stack), dtype, op, len(parts))


def _check_fits(reduced: Tensor, dtype: torch.dtype, op: str) -> None:
    if reduced.numel() == 0:
        return
    limits = torch.iinfo(dtype)
    least, most = (int(bound) for bound in reduced.aminmax())
    if least < limits.min or most > limits.max:
        raise OverflowedError(
            f"the {op} over ranks reaches {most if most > limits.max else least}, which {dtype} "
            "cannot hold. Convert the tensor to torch.int64 first."
        )
