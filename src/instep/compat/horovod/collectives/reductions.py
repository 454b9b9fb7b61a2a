"""allreduce, grouped or not, in place or not, at once or asynchronous."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from instep.compat.horovod.basics import ProcessSet, global_process_set
from instep.compat.horovod.collectives.gather_broadcast import (
    allgather_async,
)
from instep.compat.horovod.collectives.handles import (
    Handle,
    JoinedHandle,
    Start,
    full_name,
    start_by_dtype,
    submit,
    takes_arguments_of,
)
from instep.compat.horovod.compression import Compression, Compressor
from instep.compat.horovod.errors import UnsupportedOpError
from instep.compat.horovod.ops import Adasum, Average, ReduceOp, Sum, adasum, op_name, parse_op
from instep.distributed.communication.exchanges import before_values
from instep.distributed.communication.tensors import apply, make_sparse
from instep.distributed.negotiation.execution import scale

Tensors = Sequence[Tensor]
Convert = Callable[[list[Tensor]], Any]


@dataclass(frozen=True)
class NamedReduction:
    """The arguments of an allreduce or reducescatter, without its tensors."""

    name: str
    op: ReduceOp
    scales: tuple[float, float]
    process_set: ProcessSet

    def start(self, tensors: Tensors, in_place: bool = False, convert: Convert = list) -> Handle:
        """Start an allreduce of these tensors: as one where they have one dtype. The handle's
        result is `convert(results)`."""
        if len({tensor.dtype for tensor in tensors}) > 1:
            return start_by_dtype(
                lambda name, alike: replace(self, name=name).start(alike, in_place),
                self.name,
                tensors,
                convert,
            )
        if self.op == Adasum:
            return self._start_adasum(tensors, in_place, convert)
        return submit(
            "allreduce",
            self.name,
            tensors,
            self.process_set,
            lambda _, results: convert(list(tensors) if in_place else results),
            into=tensors if in_place else None,
            op=op_name("allreduce", self.op),
            scales=self.scales,
        )

    def _start_adasum(self, tensors: Tensors, in_place: bool, convert: Convert) -> Handle:
        """Gather all ranks' tensors, and combine them here."""
        size = len(self.process_set.members)
        if size.bit_count() != 1:
            raise UnsupportedOpError("Adasum", f"{size} ranks", ["pairs, of 1, 2, 4, 8, ... ranks"])
        if self.process_set is not global_process_set:
            raise UnsupportedOpError("Adasum", "a process set", ["all ranks together"])
        before, after = self.scales

        def finish(_: object, gathered: list[Tensor]) -> Any:
            results = []
            for rows, tensor in zip(gathered, tensors, strict=True):
                total = scale(adasum(rows.view(size, -1)), after).view(tensor.shape)
                if in_place:
                    tensor.detach().copy_(total)
                results.append(tensor if in_place else total)
            return convert(results)

        flat = [scale(tensor.detach(), before).reshape(-1) for tensor in tensors]
        return submit("allgather", self.name, flat, self.process_set, finish)

    def apply(
        self,
        function: type[torch.autograd.Function],
        tensors: Tensors,
        compression: type[Compressor],
    ) -> list[Tensor]:
        """The results of a differentiable function of this reduction and compressed tensors."""
        small = [compression.compress(tensor) for tensor in tensors]
        results = apply(function, self, *(tensor for tensor, _ in small))
        return [compression.decompress(r, ctx) for r, (_, ctx) in zip(results, small, strict=True)]


def parse_reduction(
    collective: str,
    name: str | None,
    op: int | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> NamedReduction:
    """The reduction of a collective's arguments; gives it a name if it has none."""
    own, scales = full_name(collective, name, process_set), (prescale_factor, postscale_factor)
    return NamedReduction(own, parse_op(op, average), scales, process_set)


def first(results: list[Tensor]) -> Tensor:
    """The result of a group of one tensor."""
    return results[0]


class _HorovodAllreduce(torch.autograd.Function):
    """The derivative is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, reduction: NamedReduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reduction = reduction
        return tuple(reduction.start(tensors).result())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = replace(ctx.reduction, name=f"{ctx.reduction.name}.backward")
        return None, *apply(_HorovodAllreduce, back, *grads)


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
        average: Horovod's older argument for the reduction: True for Average, False for Sum.
        name: by which the ranks' calls are matched; without one, the number of such calls before.
        compression: how it is sent.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: each rank's tensor is multiplied by it first.
        postscale_factor: the result is multiplied by it.
        process_set: the ranks that take part.

    Returns:
        A new tensor; its derivative is the same reduction of the gradients.

    Raises HorovodInternalError on all ranks if they disagree in shape, dtype or op; and
    NotInitializedError, WrongArgumentError, WrongDeviceError, UnsuitableTensorError,
    NameInFlightError, NotAMemberError.
    """
    for look in before_values:
        look(reduces=True)
    reduction = parse_reduction(
        "allreduce", name, op, average, prescale_factor, postscale_factor, process_set
    )
    return first(reduction.apply(_HorovodAllreduce, [tensor], compression))


def _start_allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Start:
    reduction = parse_reduction(
        "allreduce", name, op, average, prescale_factor, postscale_factor, process_set
    )
    return functools.partial(reduction.start, [tensor], convert=first)


@takes_arguments_of(_start_allreduce)
def allreduce_async(start: Start) -> Handle:
    """Start `allreduce`; not differentiable. `synchronize` the handle for the result."""
    return start()


@takes_arguments_of(_start_allreduce)
def allreduce_async_(start: Start) -> Handle:
    """Start `allreduce_`; before `synchronize`, the contents of `tensor` are undefined."""
    return start(in_place=True)


@takes_arguments_of(_start_allreduce)
def allreduce_(start: Start) -> Tensor:
    """`allreduce` in place; not differentiable."""
    result: Tensor = start(in_place=True).result()
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
    """`allreduce` of several tensors; those of one dtype are sent as one."""
    reduction = parse_reduction(
        "grouped_allreduce", name, op, average, prescale_factor, postscale_factor, process_set
    )
    return reduction.apply(_HorovodAllreduce, tensors, compression)


def _start_grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Start:
    reduction = parse_reduction(
        "grouped_allreduce", name, op, average, prescale_factor, postscale_factor, process_set
    )
    return functools.partial(reduction.start, tensors)


@takes_arguments_of(_start_grouped_allreduce)
def grouped_allreduce_async(start: Start) -> Handle:
    """Start `grouped_allreduce`; not differentiable."""
    return start()


@takes_arguments_of(_start_grouped_allreduce)
def grouped_allreduce_async_(start: Start) -> Handle:
    """Start `grouped_allreduce_`."""
    return start(in_place=True)


@takes_arguments_of(_start_grouped_allreduce)
def grouped_allreduce_(start: Start) -> list[Tensor]:
    """`grouped_allreduce` in place; not differentiable."""
    results: list[Tensor] = start(in_place=True).result()
    return results


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: int | None,
    process_set: ProcessSet = global_process_set,
) -> JoinedHandle:
    """Start to sum, or average, a sparse COO tensor: all ranks' entries are gathered.

    Returns a handle to call. Raises UnsupportedOpError for another op.
    """
    parsed = parse_op(op)
    if parsed not in (Average, Sum):
        raise UnsupportedOpError("sparse_allreduce_async", parsed.name, ["Average", "Sum"])
    name = full_name("sparse_allreduce", name, process_set)
    own = tensor.detach().coalesce()
    indices = allgather_async(own.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(own.values(), f"{name}.values", process_set)
    divisor = len(process_set.members) if parsed == Average else 1

    def join(results: list[Tensor]) -> Tensor:
        """The sum or average, sparse; entries of one index are not added up yet."""
        return make_sparse(results[0].t(), results[1] / divisor, tensor.shape)

    return JoinedHandle([indices, values], join)
