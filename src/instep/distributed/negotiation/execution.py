"""The named collectives, once all ranks are ready.

Reductions scale before and after as Horovod does: in the tensor's own dtype (half precision in
float32), integers in float64 and then towards zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from instep.distributed.communication.collectives import all_reduce
from instep.distributed.communication.exchanges import exchange
from instep.distributed.communication.groups import Group
from instep.distributed.communication.reduce_ops import reduce_parts, to_reduce_dtype
from instep.distributed.communication.tensors import as_bytes
from instep.distributed.communication.transport import get_transport
from instep.distributed.negotiation.message_table import Response

Tensors = Sequence[Tensor]

_SUM_DTYPES = ("torch.float32", "torch.float64", "torch.int64")


def execute(
    response: Response, tensors: Tensors, into: Tensors | None, group: Group
) -> list[Tensor]:
    """Run the collective; returns the results, in `into` if that is given, else in new tensors.

    Collective, in the order of responses. Raises OverflowedError, and what the transport raises.
    """
    collective = response.request.collective
    if collective == "allreduce":
        results = _all_reduce(response, tensors, group, may_overwrite=into is not None)
    else:
        results = _OTHERS[collective](response, tensors, group)
    if into is None:
        return results
    for given, result in zip(into, results, strict=True):
        if given.data_ptr() != result.data_ptr():
            given.copy_(result)
    return list(into)


def make_zeros(response: Response) -> list[Tensor]:
    """The inputs of a rank that has joined."""
    request = response.request
    dtype: torch.dtype = getattr(torch, request.dtype.removeprefix("torch.") or "float32")
    return [torch.zeros(shape, dtype=dtype, device=request.device) for shape in request.shapes]


def scale(
    tensor: Tensor, factor: float, divisor: int = 1, *, may_overwrite: bool = False
) -> Tensor:
    """`tensor` times factor, over divisor, in its own dtype; `tensor` itself where both are 1."""
    if factor == 1.0 and divisor == 1:
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        exact = tensor if factor == 1.0 else tensor.double() * factor
        return exact.div(divisor, rounding_mode="trunc").to(tensor.dtype)
    out = tensor if may_overwrite else None
    if factor != 1.0:
        tensor = torch.mul(tensor, factor, out=out)
    return tensor if divisor == 1 else torch.div(tensor, divisor, out=out)


def _sum_and_divisor(response: Response, group: Group) -> tuple[str, int]:
    """The reduction, and by what its result is divided: a mean is a sum over the group's size."""
    op = response.request.op
    return ("sum", group.size) if op == "mean" else (op, 1)


def _all_reduce(
    response: Response, tensors: Tensors, group: Group, *, may_overwrite: bool
) -> list[Tensor]:
    before, after = response.request.scales
    op, divisor = _sum_and_divisor(response, group)
    given = [scale(tensor, before) for tensor in tensors]
    if op == "sum" and response.request.dtype in _SUM_DTYPES and get_transport(group).in_place:
        totals = _overwritable(given, may_overwrite or before != 1.0)
        if some := [total for total in totals if total.numel()]:
            get_transport(group).all_reduce_each(some, op)
    else:
        flat = torch.cat([tensor.reshape(-1) for tensor in given])
        parts = _reduced(flat, op, group).split([tensor.numel() for tensor in given])
        totals = [part.view(tensor.shape) for part, tensor in zip(parts, given, strict=True)]
    return [scale(total, after, divisor, may_overwrite=True) for total in totals]


def _overwritable(tensors: Tensors, owned: bool) -> list[Tensor]:
    """Dense tensors of separate memory that may be overwritten; the given ones, if `owned`."""
    seen: set[int] = set()
    result = []
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        fit = owned and tensor.is_contiguous() and memory not in seen
        seen.add(memory)
        result.append(tensor if fit else tensor.clone(memory_format=torch.contiguous_format))
    return result


def _reduced(flat: Tensor, op: str, group: Group) -> Tensor:
    """The reduction over the group of a tensor that may be overwritten."""
    if not flat.numel():
        return flat  # on all ranks
    if op == "sum" and to_reduce_dtype(flat, op) is flat:
        get_transport(group).all_reduce(flat, op).wait()
        return flat
    return all_reduce(flat, op, group=group)


def _reduce_scatter(response: Response, tensors: Tensors, group: Group) -> list[Tensor]:
    before, after = response.request.scales
    op, divisor = _sum_and_divisor(response, group)
    results = []
    for tensor in tensors:
        gives = scale(tensor, before).split(split_sizes(len(tensor), group.size))
        shape = tuple(gives[group.own_group_rank()].shape)
        parts = exchange(get_transport(group), gives, [shape] * group.size)
        results.append(scale(reduce_parts(parts, op), after, divisor, may_overwrite=True))
    return results


def split_sizes(rows: int, size: int) -> list[int]:
    """How many rows each of `size` ranks gets; the first ones get what is left over."""
    return [rows // size + (place < rows % size) for place in range(size)]


def _all_gather(response: Response, tensors: Tensors, group: Group) -> list[Tensor]:
    transport = get_transport(group)
    results = []
    for k, tensor in enumerate(tensors):
        shapes = [(rows[k], *tensor.shape[1:]) for rows in response.rows]
        if len(set(shapes)) == 1 and tensor.numel():
            flat = torch.cat(transport.all_gather(as_bytes(tensor)))
            results.append(flat.view(tensor.dtype).view(-1, *tensor.shape[1:]))
        else:
            results.append(torch.cat(exchange(transport, [tensor] * transport.size, shapes)))
    return results


def _all_to_all(response: Response, tensors: Tensors, group: Group) -> list[Tensor]:
    (tensor,) = tensors
    me = group.own_group_rank()
    shapes = [(splits[me], *tensor.shape[1:]) for splits in response.rows]
    taken = exchange(get_transport(group), tensor.split(list(response.rows[me])), shapes)
    return [torch.cat(taken)]


def _broadcast(response: Response, tensors: Tensors, group: Group) -> list[Tensor]:
    assert response.request.root is not None
    root = group.group_rank(response.request.root)
    results = []
    for tensor in tensors:
        given = tensor.clone(memory_format=torch.contiguous_format)
        if prod(given.shape):
            get_transport(group).broadcast(as_bytes(given), root).wait()
        results.append(given)
    return results


def _barrier(response: Response, tensors: Tensors, group: Group) -> list[Tensor]:
    """All ranks are ready."""
    return []


_OTHERS: dict[str, Callable[[Response, Tensors, Group], list[Tensor]]] = {
    "reducescatter": _reduce_scatter,
    "allgather": _all_gather,
    "alltoall": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "join": _barrier,
}
