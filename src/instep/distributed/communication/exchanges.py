"""Collectives that move tensors without reducing them: all_gather, gather, scatter, all_to_all.

Tensors are sent as bytes, so any dtype works. All of them are one differentiable exchange; its
derivative is the exchange in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from instep.distributed.communication.errors import UnsuitableTensorError
from instep.distributed.communication.groups import Group
from instep.distributed.communication.tensors import (
    apply,
    as_bytes,
    check_reachable,
)
from instep.distributed.communication.transport import Transport, get_transport, group_rank
from instep.distributed.errors import DisagreementError
from instep.distributed.identity.torch_devices import current_device
from instep.distributed.numbers import on_any_rank
from instep.process.exit_status import group_ranks

Shape = tuple[int, ...]


before_collectives: list[Callable[[], None]] = []
"""Called before each collective of a script's to which all ranks must come. They may raise."""


class BeforeValues(Protocol):
    """Called before a collective that gives a rank the values of others' tensors. May warn."""

    def __call__(self, *, reduces: bool) -> None:
        """`reduces`: whether it reduces them."""


before_values: list[BeforeValues] = []


def transport_of_call(group: Group | None) -> Transport:
    """The transport of a collective that a script calls."""
    if group is None:
        for check in before_collectives:
            check()
    return get_transport(group)


def all_gather(tensor: Tensor, *, group: Group | None = None) -> list[Tensor]:
    """Every rank's tensor, in the order of ranks, on every rank.

    Args:
        tensor: any dtype; the ranks may differ in dimension 0, which may be 0, and in nothing else.
        group: the ranks that take part; all by default.

    Returns:
        As many new tensors as there are ranks. The derivative is the sum of the gradients that all
        ranks have for this rank's tensor (a reduce_scatter).

    Collective. Raises DisagreementError where the ranks' tensors differ in more than rows,
    WrongDeviceError, UnsuitableTensorError, NotAMemberError.
    """
    for look in before_values:
        look(reduces=False)
    return all_gather_internal(tensor, group)


def all_gather_internal(tensor: Tensor, group: Group | None = None) -> list[Tensor]:
    """As `all_gather`, of values of which the script need not be warned."""
    check_reachable(tensor)
    transport = transport_of_call(group)
    table, needs_grad = _gather_row_counts(tensor, [_row_count(tensor)], transport, group)
    shapes = [_with_rows(tensor, rows) for (rows,) in table]
    if all(shape == shapes[0] for shape in shapes):
        return list(apply(_AllGather, graph_anchor(needs_grad), transport, tensor)[1:])
    return exchange(transport, [tensor] * transport.size, shapes, needs_grad)


def gather(tensor: Tensor, root: int = 0, *, group: Group | None = None) -> list[Tensor]:
    """Every rank's tensor at `root`, in the order of ranks.

    Args:
        tensor: any dtype; the ranks may differ in dimension 0, which may be 0, and in nothing else.
        root: the rank that gets them.
        group: the ranks that take part; all by default.

    Returns:
        As many new tensors as there are ranks; on other ranks than root they have no elements, and
        only connect this rank's loss to the graph. The derivative scatters root's gradients.

    Collective. Raises ValueError for a root that does not exist, and what `all_gather` raises.
    """
    check_reachable(tensor)
    for look in before_values:
        look(reduces=False)
    transport, root_rank = transport_of_call(group), group_rank(root, "root", group)
    table, needs_grad = _gather_row_counts(tensor, [_row_count(tensor)], transport, group)
    inputs = [tensor if r == root_rank else tensor.new_empty(0) for r in range(transport.size)]
    shapes = [
        _with_rows(tensor, rows) if transport.rank == root_rank else (0,) for (rows,) in table
    ]
    return exchange(transport, inputs, shapes, needs_grad)


def scatter(parts: Sequence[Tensor] | None, root: int = 0, *, group: Group | None = None) -> Tensor:
    """Root's r-th tensor, on rank r.

    Args:
        parts: at root one tensor for each rank, in their order: any shapes, one dtype and device.
            Elsewhere None (any other value is ignored).
        root: the rank that sends.
        group: the ranks that take part; all by default.

    Returns:
        A new tensor, which requires a gradient on every rank if one of root's parts does. The
        derivative gathers the gradients at root, so every rank must run that backward:
        torch.autograd.grad of some `inputs` does not, on a rank where these do not lead to it, and
        neither does backward(inputs=...). Then the job ends with an error that names the lines.

    Collective. Raises, on every rank alike, ValueError for a root that does not exist or another
    number of parts, UnsuitableTensorError for different dtypes; on root alone WrongDeviceError.
    """
    transport, root_rank = transport_of_call(group), group_rank(root, "root", group)
    own = list(parts) if transport.rank == root_rank and parts is not None else []
    for part in own:
        check_reachable(part)
    specs = [(tuple(part.shape), part.dtype, part.device.type) for part in own]
    specs, needs_grad = transport.broadcast_object((specs, needs_gradient(*own)), root_rank)
    if len(specs) != transport.size:
        raise ValueError(
            f"scatter takes one part for each of {transport.size} ranks, not {len(specs)}."
        )
    if len({spec[1:] for spec in specs}) > 1:
        seen = ", ".join(f"{dtype} on {device}" for _, dtype, device in specs)
        raise UnsuitableTensorError(f"scatter takes parts of one dtype on one device, not {seen}.")
    shape, dtype, device = specs[transport.rank]
    empty = torch.empty(0, dtype=dtype, device=current_device(device))
    shapes: list[Shape] = [shape if r == root_rank else (0,) for r in range(transport.size)]
    return exchange(transport, own or [empty] * transport.size, shapes, needs_grad)[root_rank]


def all_to_all(
    tensor: Tensor, splits: Sequence[int] | None = None, *, group: Group | None = None
) -> list[Tensor]:
    """Send the r-th part of this rank's rows to rank r; receive the own part of every rank's rows.

    Args:
        tensor: (rows, ...), any dtype; the ranks may differ in dimension 0 and in nothing else.
        splits: how many rows each rank gets, in their order; by default even contiguous blocks,
            [r*n//N, (r+1)*n//N) of n rows for rank r of N.
        group: the ranks that take part; all by default.

    Returns:
        The part that each rank sent, in the order of ranks: new tensors. The derivative is the
        all_to_all in the other direction.

    Collective. Raises ValueError for splits that are not as many as ranks or do not add up to the
    rows, and what `all_gather` raises.
    """
    check_reachable(tensor)
    transport = transport_of_call(group)
    parts = _split_rows(tensor, splits, transport.size)
    table, needs_grad = _gather_row_counts(tensor, [len(part) for part in parts], transport, group)
    shapes = [_with_rows(tensor, rows[transport.rank]) for rows in table]
    return exchange(transport, parts, shapes, needs_grad)


def reduce_scatter_inputs(
    tensor: Tensor, splits: Sequence[int] | None, transport: Transport, group: Group | None
) -> list[Tensor]:
    """`all_to_all` for tensors of one shape that all ranks split alike.

    Raises DisagreementError where shapes or splits differ.
    """
    parts = _split_rows(tensor, splits, transport.size)
    rows = [len(part) for part in parts]
    _, needs_grad = _gather_row_counts(tensor, rows, transport, group, same_rows=True)
    return exchange(
        transport, parts, [tuple(parts[transport.rank].shape)] * transport.size, needs_grad
    )


# ------------------------------------------------------------------------------- the exchange


def exchange(
    transport: Transport,
    inputs: Sequence[Tensor],
    shapes: Sequence[Shape],
    needs_grad: bool = False,
) -> list[Tensor]:
    """Send the r-th tensor to rank r and receive one of the r-th shape; all have the same dtype.

    `needs_grad`: whether any rank needs a gradient of its result, so that this rank's graph must
    include the exchange.
    """
    return list(apply(_Exchange, graph_anchor(needs_grad), transport, tuple(shapes), *inputs)[1:])


class _Exchange(torch.autograd.Function):
    """Returns a graph token, then what it receives."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, transport: Transport, shapes: tuple[Shape, ...], *inputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.transport, ctx.shapes = transport, [tuple(tensor.shape) for tensor in inputs]
        dtype = inputs[0].dtype
        sizes = [prod(shape) * dtype.itemsize for shape in shapes]
        received = transport.all_to_all([as_bytes(tensor) for tensor in inputs], sizes)
        parts = (_from_bytes(part, dtype, s) for part, s in zip(received, shapes, strict=True))
        return graph_token(ctx, inputs[0]), *parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_exchange_gradients(ctx, grads, ctx.shapes)


class _AllGather(torch.autograd.Function):
    """The exchange of one tensor with all ranks, where all have the same shape."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, transport: Transport, tensor: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.transport, ctx.shape = transport, tuple(tensor.shape)
        parts = transport.all_gather(as_bytes(tensor))
        wholes = (_from_bytes(part, tensor.dtype, tensor.shape) for part in parts)
        return graph_token(ctx, tensor), *wholes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        mine = _exchange_gradients(ctx, grads, [ctx.shape] * ctx.transport.size)
        return None, None, torch.stack(mine).sum(0)


def _exchange_gradients(ctx: Any, grads: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """The derivative of an exchange.

    With create_graph this exchange is in the graph of every rank or of none. If the gradients of
    any rank have a graph, the graph of every rank leads back to the first exchange, too.
    """
    return exchange(
        ctx.transport, connect_gradients(ctx, grads), shapes, needs_grad=torch.is_grad_enabled()
    )


# ------------------------------------------------------------------- derivatives of derivatives


def graph_token(ctx: Any, like: Tensor) -> Tensor | None:
    """The first output of a collective that is differentiated: an empty tensor in its graph."""
    if not any(ctx.needs_input_grad):
        return None
    empty = like.new_empty(0)
    ctx.save_for_backward(empty)
    return empty


def connect_gradients(ctx: Any, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients of a collective's outputs, without that of its graph token.

    With create_graph, if the gradients of any rank have a graph, which may lead to the collective,
    those of every rank get one that does. Collective then.
    """
    grads = grads[1:]
    if not torch.is_grad_enabled():
        return grads
    if not on_any_rank(any(grad.requires_grad for grad in grads), ctx.transport):
        return grads
    return tuple(apply(_ConnectGradients, *ctx.saved_tensors, *grads))


class _ConnectGradients(torch.autograd.Function):
    """Gradients whose graph also leads to a graph token.

    torch.cat, for one, drops the graph of empty tensors, and so do ranks that receive nothing.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(token)
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(ctx.saved_tensors[0]), *grads


def _from_bytes(flat: Tensor, dtype: torch.dtype, shape: Shape) -> Tensor:
    return flat.view(dtype).view(shape)


def graph_anchor(needs_grad: bool) -> Tensor:
    """An input that puts a collective into the graph of a rank whose tensor needs no gradient."""
    return torch.zeros((), requires_grad=needs_grad, device="cpu")


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd is recording and any of these requires a gradient."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _gather_row_counts(
    tensor: Tensor,
    rows: list[int],
    transport: Transport,
    group: Group | None,
    same_rows: bool = False,
) -> tuple[list[list[int]], bool]:
    """Every rank's row counts, and whether any rank needs a gradient.

    Raises DisagreementError if the tensors differ in more than rows, or with `same_rows` in rows.
    """
    spec = f"{('any', *tensor.shape[1:]) if tensor.dim() else ()} {tensor.dtype}"
    if same_rows:
        spec = f"{rows} rows, {spec}"
    own = [*rows, crc32(spec.encode()), int(needs_gradient(tensor))]
    gathered = transport.all_gather(torch.tensor(own, device=tensor.device))
    table: list[list[int]] = torch.stack(gathered).tolist()
    if any(row[-2] != own[-2] for row in table):
        seen = group_ranks(transport.all_gather_object(spec))
        if group is not None:
            seen = {spec: [group.ranks[r] for r in ranks] for spec, ranks in seen.items()}
        advice = "Make them equal" + ("." if same_rows else "; only dimension 0 may differ.")
        raise DisagreementError("shape and dtype", seen, advice)
    return [row[:-2] for row in table], any(row[-1] for row in table)


def _row_count(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _with_rows(tensor: Tensor, rows: int) -> Shape:
    return (rows, *tensor.shape[1:]) if tensor.dim() else ()


def _split_rows(tensor: Tensor, splits: Sequence[int] | None, size: int) -> tuple[Tensor, ...]:
    if tensor.dim() == 0:
        raise UnsuitableTensorError("this tensor has no dimension 0 to divide; reshape it first.")
    n = tensor.shape[0]
    if splits is None:
        splits = [(r + 1) * n // size - r * n // size for r in range(size)]
    if len(splits) != size or sum(splits) != n or min(splits) < 0:
        raise ValueError(
            f"splits are {size} numbers of rows that add up to {n}, one for each rank; "
            f"got {list(splits)}."
        )
    parts: tuple[Tensor, ...] = tensor.split(list(splits))
    return parts
