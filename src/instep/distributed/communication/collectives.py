"""Reductions and broadcasts of tensors: typed, out of place and differentiable.

A derivative of a collective is a collective: every rank must run the backward. The loss that is
differentiated is the sum of all ranks' losses (as everywhere in the field). Whether a tensor
requires a gradient is the same on all ranks, and so is create_graph; whether a gradient then has a
graph need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.exchanges import (
    all_gather_internal,
    before_values,
    connect_gradients,
    graph_token,
    reduce_scatter_inputs,
    transport_of_call,
)
from instep.distributed.communication.groups import Group
from instep.distributed.communication.reduce_ops import (
    check_op,
    from_reduce_dtype,
    reduce_dtype_op,
    reduce_parts,
    to_reduce_dtype,
)
from instep.distributed.communication.tensors import apply, as_message, check_reachable
from instep.distributed.communication.transport import Transport, get_transport, group_rank
from instep.distributed.pending import Pending

Reduce = Callable[[Tensor, str], Pending]


def all_reduce(tensor: Tensor, op: str = "sum", *, group: Group | None = None) -> Tensor:
    """Combine `tensor` over all ranks; every rank gets the result.

    Args:
        tensor: any shape, the same on all ranks. "mean" needs a floating-point or complex dtype,
            "min" and "max" an ordered one.
        op: "sum", "mean" or "avg", "min", "max", "product" or "prod". A NaN anywhere is the
            result. For bool, sum and max are the logical or, product and min the logical and.
        group: the ranks that take part; all by default.

    Returns:
        A new tensor of the same shape, dtype and device. Half precision is added up in float32 and
        rounded once. The derivative of a sum is the sum of the incoming gradients, of a mean
        their mean; that of min and max goes to the ranks that attain it, in equal parts; that of a
        product is the sum times the other ranks' product (zeros are no exception). A product
        gathers all ranks' tensors.

    Collective. Raises UnknownOpError, UnsuitableTensorError, WrongDeviceError, NotAMemberError,
    DisagreementError where the ranks' calls differ, and OverflowedError where a sum or product of
    integers under 64 bits does not fit their dtype.
    """
    transport, op = _check(tensor, op, group)
    if op == "product":
        return reduce_parts(all_gather_internal(tensor, group), op)
    function = _MinMax if op in ("min", "max") else _AllReduce
    return _apply(function, tensor, op, transport)


def sum_with_graph(tensor: Tensor) -> Tensor:
    """`all_reduce(tensor)`, of numbers of instep's own."""
    return _apply(_AllReduce, tensor, "sum", get_transport())


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

    Collective. Raises ValueError for a root that does not exist, and what `all_reduce` raises
    (OverflowedError at root alone).
    """
    transport, op = _check(tensor, op, group)
    root_rank = group_rank(root, "root", group)
    if op in ("sum", "mean"):
        return _apply(_Reduce, tensor, op, root_rank, transport)
    total = all_reduce(tensor, op, group=group)
    return total if transport.rank == root_rank else total.reshape(-1)[:0]


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

    Collective. Raises ValueError for impossible splits, and what `all_reduce` raises
    (OverflowedError on the ranks that see it).
    """
    transport, op = _check(tensor, op, group)
    return reduce_parts(reduce_scatter_inputs(tensor, splits, transport, group), op)


def broadcast(tensor: Tensor, root: int = 0, *, group: Group | None = None) -> Tensor:
    """Root's tensor, on every rank.

    Args:
        tensor: the same shape and dtype on all ranks, any dtype; only root's values matter.
        root: the rank that sends.
        group: the ranks that take part; all by default.

    Returns:
        A new tensor. The derivative is the sum of all ranks' gradients at root, zero elsewhere.

    Collective. Raises ValueError for a root that does not exist, WrongDeviceError,
    UnsuitableTensorError, NotAMemberError, DisagreementError.
    """
    check_reachable(tensor)
    return _apply(_Broadcast, tensor, group_rank(root, "root", group), transport_of_call(group))


def barrier(*, group: Group | None = None) -> None:
    """Return when every rank (of `group`) has called this. Raises NotAMemberError."""
    transport_of_call(group).barrier()


def _check(tensor: Tensor, op: str, group: Group | None) -> tuple[Transport, str]:
    """The transport of the group, and the name of the reduction."""
    check_reachable(tensor)
    transport = transport_of_call(group)
    for look in before_values:
        look(reduces=True)
    return transport, check_op(op, tensor.dtype)


def _reduce_flat(tensor: Tensor, op: str, reduce_tensor: Reduce) -> Tensor:
    """A copy of `tensor` in its reduce dtype, reduced in place; a NaN of any rank stays a NaN.

    Gloo's min and max keep or lose a NaN by the order of arrival.
    """
    dense = tensor.detach().resolve_conj().resolve_neg()
    flat = to_reduce_dtype(dense, op).clone(memory_format=torch.contiguous_format)
    reduce_tensor(flat, reduce_dtype_op(op, tensor.dtype)).wait()
    if op in ("min", "max") and tensor.is_floating_point():
        nan = dense.isnan().to(torch.uint8, memory_format=torch.contiguous_format)
        reduce_tensor(nan, "max").wait()
        flat.masked_fill_(nan.bool(), float("nan"))
    return flat


def _all_reduce(tensor: Tensor, op: str, transport: Transport) -> Tensor:
    flat = _reduce_flat(tensor, op, transport.all_reduce)
    return from_reduce_dtype(flat, tensor.dtype, op, transport.size)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """The result of a function that also returns a graph token."""
    result: Tensor = apply(function, *args)[1]
    return result


TokenAndResult = tuple[Tensor | None, Tensor]
"""A graph token, and the result."""


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, transport: Transport) -> TokenAndResult:
        ctx.op, ctx.transport = op, transport
        return graph_token(ctx, tensor), _all_reduce(tensor, op, transport)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_AllReduce, *connect_gradients(ctx, grads), ctx.op, ctx.transport), None, None


class _MinMax(torch.autograd.Function):
    """The smallest or largest over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, transport: Transport) -> TokenAndResult:
        found = _all_reduce(tensor, op, transport)
        ctx.transport = transport
        ctx.attained = tensor == found if ctx.needs_input_grad[0] else None
        return graph_token(ctx, tensor), found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = connect_gradients(ctx, grads)
        attained = ctx.attained.to(grad.dtype)
        share = attained / _all_reduce(attained, "sum", ctx.transport)
        return _apply(_AllReduce, grad, "sum", ctx.transport) * share, None, None


class _Reduce(torch.autograd.Function):
    """A sum or mean at root; nothing elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, op: str, root: int, transport: Transport
    ) -> TokenAndResult:
        ctx.op, ctx.root, ctx.transport, ctx.shape = op, root, transport, tensor.shape
        flat = _reduce_flat(tensor, op, lambda copy, op: transport.reduce(copy, op, root))
        here = transport.rank == root
        total = (
            from_reduce_dtype(flat, tensor.dtype, op, transport.size)
            if here
            else tensor.new_empty(0)
        )
        return graph_token(ctx, tensor), total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = connect_gradients(ctx, grads)
        if ctx.transport.rank != ctx.root:
            grad = grad.new_zeros(ctx.shape) + grad.sum()  # of no elements: it stays in the graph
        root_grad = _apply(_Broadcast, grad, ctx.root, ctx.transport)
        mean = ctx.op == "mean"
        return root_grad / ctx.transport.size if mean else root_grad, None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, transport: Transport) -> TokenAndResult:
        ctx.root, ctx.transport = root, transport
        copy = tensor.detach().resolve_conj().resolve_neg()
        copy = copy.clone(memory_format=torch.contiguous_format)
        transport.broadcast(as_message(copy), root).wait()
        return graph_token(ctx, tensor), copy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = connect_gradients(ctx, grads)
        total = _apply(_Reduce, grad, "sum", ctx.root, ctx.transport)
        if ctx.transport.rank != ctx.root:
            total = torch.zeros_like(grad) + total.sum()
        return total, None, None


_MESSAGE_BYTES = 250 << 20
"""The most that is broadcast at once, beside a tensor that is larger: so much memory is taken."""


def broadcast_coalesced(tensors: Sequence[Tensor], root: int = 0) -> None:
    """Overwrite each tensor with root's, one message per dtype and device, of up to 250 MiB. In
    place."""
    transport = get_transport()
    for bucket in _divide_into_messages(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        transport.broadcast(as_message(flat), root).wait()
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def _divide_into_messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    begun: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        message, size = begun.get(key, ([], 0))
        if message and size + tensor.nbytes > _MESSAGE_BYTES:
            yield message
            message, size = [], 0
        message.append(tensor)
        begun[key] = message, size + tensor.nbytes
    yield from (message for message, _ in begun.values())
