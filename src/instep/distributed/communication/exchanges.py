"""Tensors that change ranks unchanged: all_gather, gather, scatter, all_to_all.

They travel as bytes, so every dtype does. One differentiable exchange carries them all: its
derivative is the exchange back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from instep.distributed.communication.errors import UnsuitableTensorError
from instep.distributed.communication.groups import Group
from instep.distributed.communication.tensors import (
    apply,
    as_bytes,
    check_reachable,
    current_device,
)
from instep.distributed.communication.transport import Transport, group_rank, transport
from instep.distributed.errors import DisagreementError
from instep.distributed.rendezvous.bootstrap import ranks_by

Shape = tuple[int, ...]


def all_gather(tensor: Tensor, *, group: Group | None = None) -> list[Tensor]:
    """Every rank's tensor, in the order of ranks, on every rank.

    Args:
        tensor: any dtype; the ranks may differ in dimension 0, which may be 0, and in nothing else.
        group: the ranks that take part; all by default.

    Returns:
        As many new tensors as there are ranks. The derivative is the sum of the gradients that all
        ranks have for this rank's tensor (a reduce_scatter).

    Raises DisagreementError, WrongDeviceError, UnsuitableTensorError, NotAMemberError.
    """
    check_reachable(tensor)
    way = transport(group)
    table, wanted = _met(tensor, [_rows(tensor)], way, group)
    shapes = [_with_rows(tensor, rows) for (rows,) in table]
    if all(shape == shapes[0] for shape in shapes):
        return list(apply(_AllGather, anchor(wanted), way, tensor)[1:])
    return exchange(way, [tensor] * way.size, shapes, wanted)


def gather(tensor: Tensor, root: int = 0, *, group: Group | None = None) -> list[Tensor]:
    """Every rank's tensor at `root`, in the order of ranks.

    Args:
        tensor: any dtype; the ranks may differ in dimension 0, which may be 0, and in nothing else.
        root: the rank that gets them.
        group: the ranks that take part; all by default.

    Returns:
        As many new tensors as there are ranks; on other ranks than root they have no elements, and
        only connect this rank's loss to the graph. The derivative scatters root's gradients.

    Raises ValueError for a root that does not exist, and what `all_gather` raises.
    """
    check_reachable(tensor)
    way, place = transport(group), group_rank(root, "root", group)
    table, wanted = _met(tensor, [_rows(tensor)], way, group)
    gives = [tensor if r == place else tensor.new_empty(0) for r in range(way.size)]
    shapes = [_with_rows(tensor, rows) if way.rank == place else (0,) for (rows,) in table]
    return exchange(way, gives, shapes, wanted)


def scatter(parts: Sequence[Tensor] | None, root: int = 0, *, group: Group | None = None) -> Tensor:
    """Root's r-th tensor, on rank r.

    Args:
        parts: at root one tensor for each rank, in their order: any shapes, one dtype and device.
            Elsewhere None (or anything: it is not looked at).
        root: the rank that gives.
        group: the ranks that take part; all by default.

    Returns:
        A new tensor, which requires a gradient on every rank if one of root's parts does. The
        derivative gathers the gradients at root, so backward must pass by it on every rank:
        torch.autograd.grad of some `inputs` does not, on a rank where these do not lead to it, and
        neither does backward(inputs=...). Then the job ends with an error that names the lines.

    Raises, on every rank alike, ValueError for a root that does not exist or another number of
    parts, UnsuitableTensorError for different dtypes; on root alone WrongDeviceError.
    """
    way, place = transport(group), group_rank(root, "root", group)
    given = list(parts) if way.rank == place and parts is not None else []
    for part in given:
        check_reachable(part)
    specs = [(tuple(part.shape), part.dtype, part.device.type) for part in given]
    specs, wanted = way.broadcast_object((specs, wants_gradient(*given)), place)
    if len(specs) != way.size:
        raise ValueError(f"scatter takes one part for each of {way.size} ranks, not {len(specs)}.")
    if len({spec[1:] for spec in specs}) > 1:
        seen = ", ".join(f"{dtype} on {device}" for _, dtype, device in specs)
        raise UnsuitableTensorError(f"scatter takes parts of one dtype on one device, not {seen}.")
    shape, dtype, device = specs[way.rank]
    nothing = torch.empty(0, dtype=dtype, device=current_device(device))
    shapes: list[Shape] = [shape if r == place else (0,) for r in range(way.size)]
    return exchange(way, given or [nothing] * way.size, shapes, wanted)[place]


def all_to_all(
    tensor: Tensor, splits: Sequence[int] | None = None, *, group: Group | None = None
) -> list[Tensor]:
    """Give rank r the r-th part of this rank's rows; get the own part of every rank's.

    Args:
        tensor: (rows, ...), any dtype; the ranks may differ in dimension 0 and in nothing else.
        splits: how many rows each rank gets, in their order; by default even contiguous blocks,
            [r*n//N, (r+1)*n//N) of n rows for rank r of N.
        group: the ranks that take part; all by default.

    Returns:
        What each rank gave, in the order of ranks: new tensors. The derivative is the all_to_all
        back.

    Raises ValueError for splits that are not as many as ranks or do not add up to the rows, and
    what `all_gather` raises.
    """
    check_reachable(tensor)
    way = transport(group)
    parts = _divided(tensor, splits, way.size)
    table, wanted = _met(tensor, [len(part) for part in parts], way, group)
    shapes = [_with_rows(tensor, rows[way.rank]) for rows in table]
    return exchange(way, parts, shapes, wanted)


def own_parts(
    tensor: Tensor, splits: Sequence[int] | None, way: Transport, group: Group | None
) -> list[Tensor]:
    """Like `all_to_all` where all ranks divide tensors of one shape alike; else raises."""
    parts = _divided(tensor, splits, way.size)
    rows = [len(part) for part in parts]
    _, wanted = _met(tensor, rows, way, group, alike=True)
    return exchange(way, parts, [tuple(parts[way.rank].shape)] * way.size, wanted)


# ------------------------------------------------------------------------------- the exchange


def exchange(
    way: Transport, gives: Sequence[Tensor], shapes: Sequence[Shape], wanted: bool = False
) -> list[Tensor]:
    """Give the r-th tensor to rank r, take one of the r-th shape from it; one dtype in all.

    `wanted`: whether a gradient of the result is wanted on any rank, and so must pass by this one.
    """
    return list(apply(_Exchange, anchor(wanted), way, tuple(shapes), *gives)[1:])


class _Exchange(torch.autograd.Function):
    """Returns a token before what it takes."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, way: Transport, shapes: tuple[Shape, ...], *gives: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.way, ctx.shapes = way, [tuple(give.shape) for give in gives]
        dtype = gives[0].dtype
        takes = [prod(shape) * dtype.itemsize for shape in shapes]
        taken = way.all_to_all([as_bytes(give) for give in gives], takes)
        parts = (_from_bytes(part, dtype, s) for part, s in zip(taken, shapes, strict=True))
        return token(ctx, gives[0]), *parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_exchanged_back(ctx, grads, ctx.shapes)


class _AllGather(torch.autograd.Function):
    """The exchange of one tensor with all, where all have the same shape; a token before them."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, way: Transport, tensor: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.way, ctx.shape = way, tuple(tensor.shape)
        parts = way.all_gather(as_bytes(tensor))
        wholes = (_from_bytes(part, tensor.dtype, tensor.shape) for part in parts)
        return token(ctx, tensor), *wholes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        mine = _exchanged_back(ctx, grads, [ctx.shape] * ctx.way.size)
        return None, None, torch.stack(mine).sum(0)


def _exchanged_back(ctx: Any, grads: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """The derivative of an exchange, whose gradients these are.

    With create_graph the graph has to pass by every rank or by none: by this exchange (`wanted`),
    and if any rank's gradients have a graph by the first one.
    """
    return exchange(ctx.way, tied(ctx, grads), shapes, wanted=torch.is_grad_enabled())


# ------------------------------------------------------------------- derivatives of derivatives


def token(ctx: Any, like: Tensor) -> Tensor | None:
    """What a collective returns first, if it is to be differentiated: no elements, only a place in
    the graph."""
    if not any(ctx.needs_input_grad):
        return None
    nothing = like.new_empty(0)
    ctx.save_for_backward(nothing)
    return nothing


def tied(ctx: Any, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients of what a collective returned behind its token.

    With create_graph, if those of any rank have a graph, which may lead to the collective, those of
    every rank have one that does. Collective then.
    """
    grads = grads[1:]
    if not torch.is_grad_enabled():
        return grads
    graphs = torch.tensor([any(grad.requires_grad for grad in grads)], device=grads[0].device)
    if not any(map(bool, ctx.way.all_gather(graphs))):
        return grads
    return tuple(apply(_Tied, *ctx.saved_tensors, *grads))


class _Tied(torch.autograd.Function):
    """Gradients whose graph leads to a token, too: torch.cat, for one, drops the graph of what has
    no elements, and so do the ranks that get nothing."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(token)
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(ctx.saved_tensors[0]), *grads


def _from_bytes(flat: Tensor, dtype: torch.dtype, shape: Shape) -> Tensor:
    return flat.view(dtype).view(shape)


def anchor(wanted: bool) -> Tensor:
    """An input that makes the graph pass by a rank whose own tensor needs no gradient."""
    return torch.zeros((), requires_grad=wanted)


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether autograd is recording and one of these requires a gradient."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _met(
    tensor: Tensor, rows: list[int], way: Transport, group: Group | None, alike: bool = False
) -> tuple[list[list[int]], bool]:
    """What all ranks are about to give: their rows; whether any of them wants a gradient.

    Raises DisagreementError unless they differ in rows only (`alike`: not even there).
    """
    kind = f"{('any', *tensor.shape[1:]) if tensor.dim() else ()} {tensor.dtype}"
    if alike:
        kind = f"{rows} rows, {kind}"
    mine = [*rows, crc32(kind.encode()), int(wants_gradient(tensor))]
    everybody = way.all_gather(torch.tensor(mine, device=tensor.device))
    table: list[list[int]] = torch.stack(everybody).tolist()
    if any(theirs[-2] != mine[-2] for theirs in table):
        seen = ranks_by(way.all_gather_object(kind))
        if group is not None:
            seen = {kind: [group.ranks[place] for place in places] for kind, places in seen.items()}
        advice = "Make them equal" + ("." if alike else "; only dimension 0 may differ.")
        raise DisagreementError("shape and dtype", seen, advice)
    return [theirs[:-2] for theirs in table], any(theirs[-1] for theirs in table)


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _with_rows(tensor: Tensor, rows: int) -> Shape:
    return (rows, *tensor.shape[1:]) if tensor.dim() else ()


def _divided(tensor: Tensor, splits: Sequence[int] | None, size: int) -> tuple[Tensor, ...]:
    if tensor.dim() == 0:
        raise UnsuitableTensorError.no_rows()
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
