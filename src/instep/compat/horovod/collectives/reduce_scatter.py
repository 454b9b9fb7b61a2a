"""reducescatter: each rank gets its rows of a reduction over all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from instep.compat.horovod.basics import ProcessSet, global_process_set
from instep.compat.horovod.collectives.gather_broadcast import check_has_rows, grouped_allgather
from instep.compat.horovod.collectives.handles import Handle, start_by_dtype, submit
from instep.compat.horovod.collectives.reductions import (
    Convert,
    NamedReduction,
    Tensors,
    first,
    parse_reduction,
)
from instep.compat.horovod.compression import Compression, Compressor
from instep.compat.horovod.ops import Average, Sum, op_name


def _start_reducescatter(
    reduction: NamedReduction, tensors: Tensors, convert: Convert = list
) -> Handle:
    for tensor in tensors:
        check_has_rows(reduction.name, tensor)
    if len({tensor.dtype for tensor in tensors}) > 1:

        def start(name: str, alike: Tensors) -> Handle:
            return _start_reducescatter(replace(reduction, name=name), alike)

        return start_by_dtype(start, reduction.name, tensors, convert)
    return submit(
        "reducescatter",
        reduction.name,
        tensors,
        reduction.process_set,
        lambda _, results: convert(results),
        op=op_name("reducescatter", reduction.op),
        scales=reduction.scales,
    )


class _HorovodReducescatter(torch.autograd.Function):
    """As in Horovod the derivative of an average gathers the gradients; that of a sum, times the
    number of ranks."""

    @staticmethod
    def forward(ctx: Any, reduction: NamedReduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduction = reduction
        return tuple(_start_reducescatter(reduction, tensors).result())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        reduction: NamedReduction = ctx.reduction
        before, after = reduction.scales
        ranks = len(reduction.process_set.members) if reduction.op == Sum else 1
        scaled = [grad * (ranks * before * after) for grad in grads]
        gathered = grouped_allgather(scaled, f"{reduction.name}.backward", reduction.process_set)
        return None, *gathered


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
            the first ones one more if the division leaves a remainder.
        name: by which the ranks' calls are matched.
        compression: how it is sent.
        op: Average, Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor: each rank's tensor is multiplied by it first.
        postscale_factor: the result is multiplied by it.

    Returns:
        A new, differentiable tensor. Raises as `allreduce`.
    """
    reduction = parse_reduction(
        "reducescatter", name, op, None, prescale_factor, postscale_factor, process_set
    )
    return first(reduction.apply(_HorovodReducescatter, [tensor], compression))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`; not differentiable."""
    reduction = parse_reduction(
        "reducescatter", name, op, None, prescale_factor, postscale_factor, process_set
    )
    return _start_reducescatter(reduction, [tensor], convert=first)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors; those of one dtype are sent as one."""
    reduction = parse_reduction(
        "grouped_reducescatter", name, op, None, prescale_factor, postscale_factor, process_set
    )
    return reduction.apply(_HorovodReducescatter, tensors, compression)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`; not differentiable."""
    reduction = parse_reduction(
        "grouped_reducescatter", name, op, None, prescale_factor, postscale_factor, process_set
    )
    return _start_reducescatter(reduction, tensors)
