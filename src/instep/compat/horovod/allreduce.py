"""allreduce, in all its forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from instep.compat.horovod.adasum import adasum, check_size
from instep.compat.horovod.compression import Compression, Compressor
from instep.compat.horovod.errors import UnsupportedOpError
from instep.compat.horovod.handles import Handle, named, submit
from instep.compat.horovod.moves import allgather_async
from instep.compat.horovod.ops import Adasum, Average, ReduceOp, Sum, chosen, word
from instep.compat.horovod.sets import ProcessSet, global_process_set
from instep.distributed.communication.tensors import apply
from instep.distributed.negotiation.execution import scaled

Tensors = Sequence[Tensor]
Then = Callable[[list[Tensor]], Any]


@dataclass(frozen=True)
class Reduction:
    """An allreduce, less its tensors."""

    name: str
    op: ReduceOp
    scales: tuple[float, float]
    process_set: ProcessSet

    def start(self, tensors: Tensors, into: Tensors | None = None, then: Then = list) -> Handle:
        """Submit it. The handle gives what `then` makes of the results."""
        if self.op == Adasum:
            return self._start_adasum(tensors, into, then)
        return submit(
            "allreduce",
            self.name,
            tensors,
            self.process_set,
            lambda _, results: then(results if into is None else list(into)),
            into=into,
            op=word("allreduce", self.op),
            scales=self.scales,
        )

    def _start_adasum(self, tensors: Tensors, into: Tensors | None, then: Then) -> Handle:
        """Gather all ranks' tensors, and combine them here."""
        size = len(self.process_set.members)
        check_size(size)
        if self.process_set is not global_process_set:
            raise UnsupportedOpError.adasum_set()
        before, after = self.scales

        def finish(_: object, gathered: list[Tensor]) -> Any:
            results = []
            for k, (rows, tensor) in enumerate(zip(gathered, tensors, strict=True)):
                total = scaled(adasum(rows.view(size, -1)), after).view(tensor.shape)
                results.append(total if into is None else into[k])
                if into is not None:
                    into[k].detach().copy_(total)
            return then(results)

        flat = [scaled(tensor.detach(), before).reshape(-1) for tensor in tensors]
        return submit("allgather", self.name, flat, self.process_set, finish)


def only(results: list[Tensor]) -> Tensor:
    """Of a group of one."""
    return results[0]


class _AllReduce(torch.autograd.Function):
    """The derivative is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduction = reduction
        return tuple(reduction.start(tensors).result())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = replace(ctx.reduction, name=f"{ctx.reduction.name}.backward")
        return None, *apply(_AllReduce, back, *grads)


def _meant(
    kind: str,
    name: str | None,
    op: int | None,
    average: bool | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Reduction:
    return Reduction(named(kind, name, process_set), chosen(op, average), scales, process_set)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine `tensor` over all ranks (of the set).

    Args:
        tensor: any shape, the same on all ranks.
        average: the old way to name the reduction: True for Average, False for Sum.
        name: what ranks are matched by; without one, the number of nameless calls before.
        compression: how it travels.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: what each rank's tensor is multiplied by first.
        postscale_factor: what the result is multiplied by.
        process_set: the ranks that take part.

    Returns:
        A new tensor; its derivative is the same reduction of the gradients.

    Raises HorovodInternalError on all ranks where they disagree in shape, dtype or op, and what
    `submit` raises.
    """
    small, ctx = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    meant = _meant("allreduce", name, op, average, scales, process_set)
    (result,) = apply(_AllReduce, meant, small)
    return compression.decompress(result, ctx)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce`; not differentiable. `synchronize` the handle for the result."""
    scales = (prescale_factor, postscale_factor)
    meant = _meant("allreduce", name, op, average, scales, process_set)
    return meant.start([tensor], then=only)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce_`; until `synchronize`, `tensor` holds anything."""
    scales = (prescale_factor, postscale_factor)
    meant = _meant("allreduce", name, op, average, scales, process_set)
    return meant.start([tensor], into=[tensor], then=only)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce` in place; not differentiable."""
    handle = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    result: Tensor = handle.result()
    return result


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors of one dtype, which travel as one."""
    small = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    meant = _meant("grouped_allreduce", name, op, average, scales, process_set)
    results = apply(_AllReduce, meant, *(tensor for tensor, _ in small))
    return [compression.decompress(r, ctx) for r, (_, ctx) in zip(results, small, strict=True)]


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce`; not differentiable."""
    scales = (prescale_factor, postscale_factor)
    return _meant("grouped_allreduce", name, op, average, scales, process_set).start(tensors)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce_`."""
    scales = (prescale_factor, postscale_factor)
    meant = _meant("grouped_allreduce", name, op, average, scales, process_set)
    return meant.start(tensors, into=tensors)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce` in place; not differentiable."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    results: list[Tensor] = handle.result()
    return results


class SparseHandle:
    """A sparse allreduce under way: call it, or `synchronize` it, for the sum."""

    def __init__(self, indices: Handle, values: Handle, shape: torch.Size, divisor: int) -> None:
        self._indices, self._values, self._shape, self._divisor = indices, values, shape, divisor

    def poll(self) -> bool:
        """Whether `result` does not wait."""
        return self._indices.poll() and self._values.poll()

    def result(self) -> Tensor:
        """The sum or average, sparse; entries of one index are not added up yet."""
        indices: Tensor = self._indices.result()
        values: Tensor = self._values.result()
        return torch.sparse_coo_tensor(
            indices.t(), values / self._divisor, self._shape, check_invariants=False
        )

    __call__ = result


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: int | None,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Start to sum, or average, a sparse COO tensor: all ranks' entries are gathered.

    Returns a handle to call. Raises UnsupportedOpError for another op.
    """
    meant = chosen(op)
    if meant not in (Average, Sum):
        raise UnsupportedOpError("sparse_allreduce_async", meant.name, ["Average", "Sum"])
    name = named("sparse_allreduce", name, process_set)
    mine = tensor.detach().coalesce()
    indices = allgather_async(mine.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(mine.values(), f"{name}.values", process_set)
    divisor = len(process_set.members) if meant == Average else 1
    return SparseHandle(indices, values, tensor.shape, divisor)
