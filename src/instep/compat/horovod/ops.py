"""The reductions, by Horovod's names and in instep's words."""

from __future__ import annotations

from enum import IntEnum

from instep.compat.horovod.errors import UnsupportedOpError, WrongArgumentError


class ReduceOp(IntEnum):
    """What is made of the ranks' tensors."""

    Average = 0
    """The sum times 1 / size; of integers, rounded towards zero."""
    Sum = 1
    Adasum = 2
    """Maleki et al. 2020: sums what is orthogonal, averages what is parallel."""
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp

_WORDS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}


def chosen(op: int | None, average: bool | None = None) -> ReduceOp:
    """The reduction that was meant; Average by default.

    Raises WrongArgumentError for both ways at once, UnsupportedOpError for an unknown one.
    """
    if average is not None:
        if op is not None:
            raise WrongArgumentError.op_and_average()
        return Average if average else Sum
    if op is None:
        return Average
    if op not in list(ReduceOp):
        raise UnsupportedOpError("allreduce", repr(op), [known.name for known in ReduceOp])
    return ReduceOp(op)


def word(collective: str, op: ReduceOp) -> str:
    """instep's word for it. Raises UnsupportedOpError for Adasum, which only allreduce makes."""
    if op not in _WORDS:
        raise UnsupportedOpError(collective, op.name, [known.name for known in _WORDS])
    return _WORDS[op]
