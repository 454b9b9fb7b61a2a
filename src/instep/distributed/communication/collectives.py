"""Talking: reductions and broadcasts of tensors, typed, out of place and differentiable.

A derivative of a collective is a collective: every rank must run the backward. The loss that is
differentiated is the sum of all ranks' losses (as everywhere in the field). Whether a tensor
requires a gradient is the same on all ranks, and so is create_graph; whether a gradient then has a
graph need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.exchanges import all_gather, own_parts, tied, token
from instep.distributed.communication.groups import Group
from instep.distributed.communication.reduce_ops import (
    check_op,
    from_reduce_dtype,
    reduce_dtype_op,
    reduce_parts,
    to_reduce_dtype,
)
from instep.distributed.communication.tensors import apply, as_bytes, check_reachable
from instep.distributed.communication.transport import Pending, Transport, group_rank, transport

Move = Callable[[Tensor, str], Pending]


def all_reduce(tensor: Tensor, op: str = "sum", *, group: Group | None = None) -> Tensor:
    """Combine `tensor` over all ranks; every rank gets the result.

    Args:
        tensor: any shape, the same on all ranks. "mean" needs a floating-point or complex dtype,
            "min" and "max" an ordered one.
        op: "sum", "mean", "min", "max" or "product". A NaN anywhere is the result. For bool, sum
            and max are the logical or, product and min the logical and.
        group: the ranks that take part; all by default.

    Returns:
        A new tensor of the same shape, dtype and device. Half precision is added up in float32 and
        rounded once. The derivative of a sum is the sum of the incoming gradients, of a mean
        their mean; that of min and max goes to the ranks that attain it, in equal parts; that of a
        product is the sum times the other ranks' product (zeros are no exception). A product
        gathers all ranks' tensors.

    Raises UnknownOpError, UnsuitableTensorError, WrongDeviceError, NotAMemberError, and
    OverflowedError where a sum or product of integers under 64 bits does not fit their dtype.
    """
    way = _way(tensor, op, group)
    if op == "product":
        return reduce_parts(all_gather(tensor, group=group), op)
    function = _Extreme if op in ("min", "max") else _AllReduce
    return _applied(function, tensor, op, way)


def reduce(tensor: Tensor, op: str = "sum", root: int = 0, *, group: Group | None = None) -> Tensor:
    """Combine `tensor` over all ranks; `root` gets the result.

    Args:
        tensor: as for `all_reduce`.
        op: as for `all_reduce`.
        root: the rank that gets the result.
        group: the ranks that take part; all by default.

    Returns:
        At root what `all_reduce` returns. Elsewhere a tensor of shape (0,): it holds nothing, and
        connects this rank's loss to the graph (its sum() is 0). The derivative of a sum is root's
        gradient, on every rank; of the others as for `all_reduce`.

    Raises ValueError for a root that does not exist, and what `all_reduce` raises
    (OverflowedError at root alone).
    """
    way, place = _way(tensor, op, group), group_rank(root, "root", group)
    if op in ("sum", "mean"):
        return _applied(_Reduce, tensor, op, place, way)
    total = all_reduce(tensor, op, group=group)
    return total if way.rank == place else total.reshape(-1)[:0]


def reduce_scatter(
    tensor: Tensor,
    op: str = "sum",
    splits: Sequence[int] | None = None,
    *,
    group: Group | None = None,
) -> Tensor:
    """Combine `tensor` over all ranks; rank r gets the r-th part of the result's rows.

    Args:
        tensor: (rows, ...), the same shape on all ranks; the dtype as for `all_reduce`.
        op: as for `all_reduce`.
        splits: how many rows each rank gets, the same on all; by default even contiguous blocks,
            [r*n//N, (r+1)*n//N) of n rows for rank r of N.
        group: the ranks that take part; all by default.

    Returns:
        A new tensor. The derivative of a sum is the all_gather of the gradients; of the others as
        for `all_reduce`.

    Raises ValueError for impossible splits, DisagreementError where the ranks' shapes or splits
    differ, and what `all_reduce` raises (OverflowedError on the ranks that see it).
    """
    way = _way(tensor, op, group)
    return reduce_parts(own_parts(tensor, splits, way, group), op)


def broadcast(tensor: Tensor, root: int = 0, *, group: Group | None = None) -> Tensor:
    """Root's tensor, on every rank.

    Args:
        tensor: the same shape and dtype on all ranks, any dtype; only root's values matter.
        root: the rank that gives.
        group: the ranks that take part; all by default.

    Returns:
        A new tensor. The derivative is the sum of all ranks' gradients at root, zero elsewhere.

    Raises ValueError for a root that does not exist, WrongDeviceError, UnsuitableTensorError,
    NotAMemberError.
    """
    check_reachable(tensor)
    return _applied(_Broadcast, tensor, group_rank(root, "root", group), transport(group))


def barrier(*, group: Group | None = None) -> None:
    """Return when every rank (of `group`) has come here. Raises NotAMemberError."""
    way = transport(group)
    here = torch.zeros((), device=way.control_device)
    way.all_reduce(here, "sum").wait()
    here.item()  # a GPU's own work is only queued until then


def _way(tensor: Tensor, op: str, group: Group | None) -> Transport:
    check_reachable(tensor)
    check_op(op, tensor.dtype)
    return transport(group)


def _moved(tensor: Tensor, op: str, move: Move) -> Tensor:
    """Carriers of `tensor` after an in-place reduction; a NaN of any rank stays one.

    Gloo's min and max keep or lose a NaN by the order of arrival.
    """
    dense = tensor.detach().resolve_conj().resolve_neg()
    flat = to_reduce_dtype(dense, op).clone(memory_format=torch.contiguous_format)
    move(flat, reduce_dtype_op(op, tensor.dtype)).wait()
    if op in ("min", "max") and tensor.is_floating_point():
        nan = dense.isnan().to(torch.uint8, memory_format=torch.contiguous_format)
        move(nan, "max").wait()
        flat.masked_fill_(nan.bool(), float("nan"))
    return flat


def _all_reduced(tensor: Tensor, op: str, way: Transport) -> Tensor:
    flat = _moved(tensor, op, way.all_reduce)
    return from_reduce_dtype(flat, tensor.dtype, op, way.size)


def _applied(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """What it returns behind its token."""
    result: Tensor = apply(function, *args)[1]
    return result


Returned = tuple[Tensor | None, Tensor]
"""A token, and the result."""


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, way: Transport) -> Returned:
        ctx.op, ctx.way = op, way
        return token(ctx, tensor), _all_reduced(tensor, op, way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _applied(_AllReduce, *tied(ctx, grads), ctx.op, ctx.way), None, None


class _Extreme(torch.autograd.Function):
    """The smallest or largest over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, way: Transport) -> Returned:
        found = _all_reduced(tensor, op, way)
        ctx.way = way
        ctx.attained = tensor == found if ctx.needs_input_grad[0] else None
        return token(ctx, tensor), found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = tied(ctx, grads)
        attained = ctx.attained.to(grad.dtype)
        share = attained / _all_reduced(attained, "sum", ctx.way)
        return _applied(_AllReduce, grad, "sum", ctx.way) * share, None, None


class _Reduce(torch.autograd.Function):
    """A sum or mean at root; nothing elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, root: int, way: Transport) -> Returned:
        ctx.op, ctx.root, ctx.way, ctx.shape = op, root, way, tensor.shape
        flat = _moved(tensor, op, lambda carrier, how: way.reduce(carrier, how, root))
        here = way.rank == root
        total = from_reduce_dtype(flat, tensor.dtype, op, way.size) if here else tensor.new_empty(0)
        return token(ctx, tensor), total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = tied(ctx, grads)
        if ctx.way.rank != ctx.root:
            grad = grad.new_zeros(ctx.shape) + grad.sum()  # of nothing: stays in the graph
        given = _applied(_Broadcast, grad, ctx.root, ctx.way)
        return given / ctx.way.size if ctx.op == "mean" else given, None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, way: Transport) -> Returned:
        ctx.root, ctx.way = root, way
        copy = tensor.detach().resolve_conj().resolve_neg()
        copy = copy.clone(memory_format=torch.contiguous_format)
        way.broadcast(as_bytes(copy), root).wait()
        return token(ctx, tensor), copy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = tied(ctx, grads)
        total = _applied(_Reduce, grad, "sum", ctx.root, ctx.way)
        if ctx.way.rank != ctx.root:
            total = torch.zeros_like(grad) + total.sum()
        return total, None, None
