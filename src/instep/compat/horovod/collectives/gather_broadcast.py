"""allgather, broadcast and alltoall: collectives that copy rows and compute nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from instep.compat.horovod.basics import ProcessSet, global_process_set, rank
from instep.compat.horovod.collectives.handles import (
    Handle,
    Start,
    full_name,
    in_order,
    places_by_dtype,
    start_by_dtype,
    submit,
    takes_arguments_of,
)
from instep.compat.horovod.errors import WrongArgumentError
from instep.distributed.communication.tensors import apply
from instep.distributed.negotiation.message_table import Response

Tensors = Sequence[Tensor]

# ---------------------------------------------------------------------------------- allgather


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """All ranks' rows, one after the other.

    Args:
        tensor: (rows, ...); the ranks may differ in the number of rows, and in nothing else.
        name: by which the ranks' calls are matched.
        process_set: the ranks that take part.

    Returns:
        A new tensor. As in Horovod, its derivative is this rank's rows of the *average* of the
        ranks' gradients. Raises as `allreduce`, and WrongArgumentError for a scalar.
    """
    name = full_name("allgather", name, process_set)
    (gathered,) = apply(_HorovodAllgather, name, process_set, tensor)
    result: Tensor = gathered
    return result


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather`; not differentiable."""
    return _start_allgather(
        full_name("allgather", name, process_set), [tensor], process_set, single=True
    )


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors; those of one dtype are sent as one."""
    places = places_by_dtype(full_name("grouped_allgather", name, process_set), tensors)
    gathered = [
        apply(_HorovodAllgather, own, process_set, *(tensors[each] for each in at))
        for own, at in places.items()
    ]
    return in_order(places.values(), gathered)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `grouped_allgather`; not differentiable."""
    name = full_name("grouped_allgather", name, process_set)
    return _start_allgather(name, tensors, process_set)


def _start_allgather(
    name: str, tensors: Tensors, process_set: ProcessSet, single: bool = False
) -> Handle:
    for tensor in tensors:
        check_has_rows(name, tensor)
    if len({tensor.dtype for tensor in tensors}) > 1:
        return start_by_dtype(
            lambda own, alike: _start_allgather(own, alike, process_set), name, tensors, list
        )
    return submit(
        "allgather",
        name,
        tensors,
        process_set,
        lambda _, results: results[0] if single else results,
    )


def check_has_rows(name: str, tensor: Tensor) -> None:
    """Raise WrongArgumentError for a tensor without a dimension 0."""
    if tensor.dim() == 0:
        raise WrongArgumentError(
            f"{name} needs a tensor with rows; this one has no dimension. Reshape it first."
        )


class _HorovodAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        for tensor in tensors:
            check_has_rows(name, tensor)
        ctx.name, ctx.process_set = name, process_set

        def finish(response: Response, results: list[Tensor]) -> list[Tensor]:
            me = process_set.members.index(rank())
            ctx.own_rows = [
                (sum(rows[k] for rows in response.rows[:me]), response.rows[me][k])
                for k in range(len(tensors))
            ]
            return results

        return tuple(submit("allgather", name, tensors, process_set, finish).result())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        means = average(f"{ctx.name}.backward", grads, ctx.process_set)
        own = zip(means, ctx.own_rows, strict=True)
        return None, None, *(mean.narrow(0, start, rows) for mean, (start, rows) in own)


def average(name: str, tensors: Tensors, process_set: ProcessSet) -> list[Tensor]:
    """The ranks' average of each tensor."""
    handle = submit("allreduce", name, tensors, process_set, lambda _, results: results, op="mean")
    means: list[Tensor] = handle.result()
    return means


# ---------------------------------------------------------------------------------- broadcast


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Root's tensor.

    Args:
        tensor: the same shape and dtype on all ranks.
        root_rank: the source; a rank of the job, in process sets too.
        name: by which the ranks' calls are matched.
        process_set: the ranks that take part.

    Returns:
        A new tensor. As in Horovod, its derivative is the *average* of the ranks' gradients at
        root, and zeros elsewhere. Raises as `allreduce`, and ValueError for a root outside.
    """
    name = full_name("broadcast", name, process_set)
    result: Tensor = apply(_HorovodBroadcast, tensor, root_rank, name, process_set)
    return result


def _parse_broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Start:
    name = full_name("broadcast", name, process_set)
    return functools.partial(_start_broadcast, name, tensor, root_rank, process_set)


@takes_arguments_of(_parse_broadcast)
def broadcast_async(start: Start) -> Handle:
    """Start `broadcast`; not differentiable."""
    return start()


@takes_arguments_of(_parse_broadcast)
def broadcast_async_(start: Start) -> Handle:
    """Start `broadcast_`; before `synchronize`, the contents of `tensor` are undefined."""
    return start(in_place=True)


@takes_arguments_of(_parse_broadcast)
def broadcast_(start: Start) -> Tensor:
    """`broadcast` in place; not differentiable."""
    result: Tensor = start(in_place=True).result()
    return result


def _start_broadcast(
    name: str, tensor: Tensor, root: int, process_set: ProcessSet, in_place: bool = False
) -> Handle:
    if root not in process_set.members:
        raise WrongArgumentError.root(root, process_set.members)
    return submit(
        "broadcast",
        name,
        [tensor],
        process_set,
        lambda _, results: tensor if in_place else results[0],
        into=[tensor] if in_place else None,
        root=root,
    )


class _HorovodBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str, process_set: ProcessSet) -> Tensor:
        ctx.root, ctx.name, ctx.process_set = root, name, process_set
        result: Tensor = _start_broadcast(name, tensor, root, process_set).result()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (mean,) = average(f"{ctx.name}.backward", grads, ctx.process_set)
        return mean if rank() == ctx.root else torch.zeros_like(mean), None, None, None


# ----------------------------------------------------------------------------------- alltoall


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send a part of this rank's rows to each rank; receive a part of every rank's rows.

    Args:
        tensor: (rows, ...); the ranks may differ in the number of rows, and in nothing else.
        splits: the number of rows for each rank, integers; by default the same for all.
        name: by which the ranks' calls are matched.
        process_set: the ranks that take part.

    Returns:
        The rows received, in the order of ranks; with splits also the number of rows from each
        rank, int32. The derivative is the alltoall back. Raises as `allreduce`, and
        WrongArgumentError for splits that are no integers or do not add up.
    """
    name = full_name("alltoall", name, process_set)
    gathered, received = apply(_HorovodAlltoall, tensor, splits, name, process_set)
    return gathered if splits is None else (gathered, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `alltoall`; not differentiable."""
    return _start_alltoall(full_name("alltoall", name, process_set), tensor, splits, process_set)


def _start_alltoall(
    name: str,
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None,
    process_set: ProcessSet,
    always_both: bool = False,
) -> Handle:
    check_has_rows(name, tensor)
    counts = _split_sizes(splits, len(tensor), len(process_set.members))
    device = splits.device if isinstance(splits, Tensor) else "cpu"

    def finish(response: Response, results: list[Tensor]) -> Any:
        me = process_set.members.index(rank())
        received = torch.tensor(
            [rows[me] for rows in response.rows], dtype=torch.int32, device="cpu"
        )
        both = results[0], received.to(device)
        return both if always_both or splits is not None else both[0]

    return submit("alltoall", name, [tensor], process_set, finish, splits=counts)


def _split_sizes(splits: Tensor | Sequence[int] | None, rows: int, size: int) -> tuple[int, ...]:
    if splits is None:
        if rows % size:
            raise WrongArgumentError(
                f"alltoall without splits gives each of {size} ranks the same number of rows, but "
                f"this tensor has {rows}. Give splits."
            )
        return (rows // size,) * size
    given = splits if isinstance(splits, Tensor) else torch.as_tensor(splits, device="cpu")
    if given.dtype not in (torch.int32, torch.int64):
        raise WrongArgumentError(
            f"splits of alltoall are integers (torch.int32), not {given.dtype}."
        )
    counts = given.tolist()
    if given.dim() != 1 or len(counts) != size or sum(counts) != rows or min(counts) < 0:
        raise WrongArgumentError(
            f"splits of alltoall are {size} numbers of rows, one for each rank, that add up to "
            f"the tensor's {rows}; got {counts}."
        )
    return tuple(counts)


class _HorovodAlltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Tensor | Sequence[int] | None,
        name: str,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor]:
        ctx.name, ctx.process_set = name, process_set
        handle = _start_alltoall(name, tensor, splits, process_set, always_both=True)
        gathered, ctx.received = handle.result()
        ctx.mark_non_differentiable(ctx.received)
        return gathered, ctx.received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        name = f"{ctx.name}.backward"
        back, _ = apply(_HorovodAlltoall, grads[0], ctx.received, name, ctx.process_set)
        return back, None, None, None
