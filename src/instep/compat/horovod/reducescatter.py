"""reducescatter, in all its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instep.compat.horovod.compression import Compression, Compressor
from instep.compat.horovod.handles import Handle, named, submit
from instep.compat.horovod.moves import check_has_rows, grouped_allgather
from instep.compat.horovod.ops import Average, ReduceOp, Sum, chosen, word
from instep.compat.horovod.sets import ProcessSet, global_process_set
from instep.distributed.communication.tensors import apply

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Division:
    """A reducescatter, less its tensors."""

    name: str
    op: ReduceOp
    scales: tuple[float, float]
    process_set: ProcessSet

    def start(self, tensors: Tensors, single: bool = False) -> Handle:
        """Submit it; its result is a list, or one tensor."""
        for tensor in tensors:
            check_has_rows(self.name, tensor)
        return submit(
            "reducescatter",
            self.name,
            tensors,
            self.process_set,
            lambda _, results: results[0] if single else results,
            op=word("reducescatter", self.op),
            scales=self.scales,
        )


class _ReduceScatter(torch.autograd.Function):
    """As in Horovod the derivative of an average gathers the gradients; that of a sum, times the
    number of ranks."""

    @staticmethod
    def forward(ctx: Any, division: Division, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.division = division
        return tuple(division.start(tensors).result())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        division: Division = ctx.division
        before, after = division.scales
        ranks = len(division.process_set.members) if division.op == Sum else 1
        scaled = [grad * (ranks * before * after) for grad in grads]
        gathered = grouped_allgather(scaled, f"{division.name}.backward", division.process_set)
        return None, *gathered


def _meant(
    kind: str,
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Division:
    return Division(named(kind, name, process_set), chosen(op), scales, process_set)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine `tensor` over all ranks; each gets its rows of the result.

    Args:
        tensor: (rows, ...), the same shape on all ranks. Each rank gets the same number of rows,
            the first ones one more where that does not come out even.
        name: what ranks are matched by.
        compression: how it travels.
        op: Average, Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor: what each rank's tensor is multiplied by first.
        postscale_factor: what the result is multiplied by.

    Returns:
        A new, differentiable tensor. Raises as `allreduce`.
    """
    small, ctx = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    meant = _meant("reducescatter", name, op, scales, process_set)
    (result,) = apply(_ReduceScatter, meant, small)
    return compression.decompress(result, ctx)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`; not differentiable."""
    scales = (prescale_factor, postscale_factor)
    return _meant("reducescatter", name, op, scales, process_set).start([tensor], single=True)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors of one dtype."""
    small = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    meant = _meant("grouped_reducescatter", name, op, scales, process_set)
    results = apply(_ReduceScatter, meant, *(tensor for tensor, _ in small))
    return [compression.decompress(r, ctx) for r, (_, ctx) in zip(results, small, strict=True)]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`; not differentiable."""
    scales = (prescale_factor, postscale_factor)
    return _meant("grouped_reducescatter", name, op, scales, process_set).start(tensors)
