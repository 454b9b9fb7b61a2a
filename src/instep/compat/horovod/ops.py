"""The reductions by Horovod's names, and Adasum itself.

Adasum (Maleki et al. 2020, "Scaling distributed training with adaptive summation", eq. 2) makes

    (1 - a.b / 2 |a|^2) a + (1 - a.b / 2 |b|^2) b

of two gradients a and b: their sum if they are orthogonal, their average if they are parallel.
Ranks are combined in pairs, then pairs in pairs.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from instep.compat.horovod.errors import UnsupportedOpError, WrongArgumentError


class ReduceOp(IntEnum):
    """The result of the ranks' tensors."""

    Average = 0
    """The sum times 1 / size; of integers, rounded towards zero."""
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp

_NAMES = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}


def parse_op(op: int | None, average: bool | None = None) -> ReduceOp:
    """The reduction of these two arguments of a collective; Average by default.

    Raises WrongArgumentError if both are given, UnsupportedOpError for an unknown one.
    """
    if average is not None:
        if op is not None:
            raise WrongArgumentError(
                "give op or average, not both; op=hvd.Average is what average=True was."
            )
        return Average if average else Sum
    if op is None:
        return Average
    if op not in list(ReduceOp):
        raise UnsupportedOpError("allreduce", repr(op), [known.name for known in ReduceOp])
    return ReduceOp(op)


def op_name(collective: str, op: ReduceOp) -> str:
    """instep's name of a reduction. Raises UnsupportedOpError for Adasum, for which it has none."""
    if op not in _NAMES:
        raise UnsupportedOpError(collective, op.name, [known.name for known in _NAMES])
    return _NAMES[op]


def adasum(rows: Tensor) -> Tensor:
    """Adasum of 1, 2, 4, ... gradients.

    Args:
        rows: (ranks, elements), floating point.

    Returns:
        (elements,), of the same dtype. Products are added up in float64.
    """
    level = list(rows.double().unbind())
    while len(level) > 1:
        level = [_adasum_of_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0].to(rows.dtype)


def _adasum_of_pair(a: Tensor, b: Tensor) -> Tensor:
    dot = torch.dot(a, b)
    return _coefficient(dot, a) * a + _coefficient(dot, b) * b


def _coefficient(dot: Tensor, a: Tensor) -> Tensor:
    square = torch.dot(a, a)
    return torch.where(square > 0, 1 - dot / (2 * square), torch.ones_like(square))
