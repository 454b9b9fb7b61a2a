"""Where tensors cross between the script, in which every rank has the whole batch, and a divided
call, in which each has its own rows.

Outside all ranks compute the same, so a gradient there is whole on every rank. Inside, what is
differentiated is the sum over ranks of each rank's own function. Each crossing has the derivative
that this asks for (Shoeybi et al. 2019, section 3, call two of them f and g):

    own rows in           <->  all rows, gathered, out
    a sum over ranks out  <->  this rank's weight times the gradient
    a parameter in        <->  the sum over ranks (see `sums`)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.tensors import apply, as_bytes
from instep.distributed.communication.transport import Transport
from instep.training.blocks import Block


def own_rows(whole: Tensor, block: Block, dim: int, way: Transport) -> Tensor:
    """This rank's rows of a tensor that every rank has; along other dimensions than 0 a copy."""
    return apply(_OwnRows, whole, block, dim, way) if _tracked(whole) else _cut(whole, block, dim)


def all_rows(own: Tensor, block: Block, dim: int, way: Transport) -> Tensor:
    """The rows of all ranks, of which each may have several per sample. Collective."""
    return (
        apply(_AllRows, own, block, dim, way) if _tracked(own) else gathered(own, block, dim, way)
    )


def summed(own: Tensor, weight: float, way: Transport) -> Tensor:
    """The sum over ranks of each one's tensor times its weight. Collective."""
    total: Tensor = apply(_Summed, own, weight, way)
    return total


def share(whole: Tensor, weight: float, way: Transport) -> Tensor:
    """What every rank has, times this rank's weight: a sum over ranks, seen from behind."""
    part: Tensor = apply(_Share, whole, weight, way)
    return part


def passed(own: Tensor) -> Tensor:
    """This rank's rows, from one divided call into the next."""
    same: Tensor = apply(_Passed, own)
    return same


def came_in(node: Any) -> bool:
    """Whether this node of the autograd graph is where a tensor came into a divided call."""
    return isinstance(node, tuple(door._backward_cls for door in (_OwnRows, _Share, _Passed)))


def gathered(own: Tensor, block: Block, dim: int, way: Transport) -> Tensor:
    """`all_rows` without a derivative."""
    moved = own.detach().movedim(dim, 0).contiguous()
    each, per_sample = moved.shape[1:], moved.shape[0] // block.count
    widest = -(-block.total // block.size) * per_sample
    if moved.shape[0] < widest:
        padding = moved.new_empty((widest - moved.shape[0], *each))
        moved = torch.cat((moved, padding))
    parts = way.all_gather(as_bytes(moved))
    rows = [
        part.view(own.dtype).view(widest, *each)[
            : Block(r, block.size, block.total).count * per_sample
        ]
        for r, part in enumerate(parts)
    ]
    whole = torch.cat(rows)
    if dim == 0:
        return whole
    return whole.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _cut(whole: Tensor, block: Block, dim: int) -> Tensor:
    per_sample = whole.shape[dim] // block.total
    rows = whole.narrow(dim, block.start * per_sample, block.count * per_sample)
    return rows if dim == 0 else rows.contiguous()


def _tracked(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, block: Block, dim: int, way: Transport) -> Tensor:
        ctx.block, ctx.dim, ctx.way = block, dim, way
        return _cut(whole, block, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_rows(grads[0], ctx.block, ctx.dim, ctx.way), None, None, None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, block: Block, dim: int, way: Transport) -> Tensor:
        ctx.block, ctx.dim, ctx.way = block, dim, way
        return gathered(own, block, dim, way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return own_rows(grads[0], ctx.block, ctx.dim, ctx.way), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, weight: float, way: Transport) -> Tensor:
        ctx.weight, ctx.way = weight, way
        total = own.detach() * weight
        total = total.contiguous()
        way.all_reduce(torch.view_as_real(total) if total.is_complex() else total, "sum").wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return share(grads[0], ctx.weight, ctx.way), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, weight: float, way: Transport) -> Tensor:
        ctx.weight, ctx.way = weight, way
        return whole * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return summed(grads[0], ctx.weight, ctx.way), None, None


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
