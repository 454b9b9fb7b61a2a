"""Mappings between the script, in which every rank has the whole batch, and a sharded call, in
which each has its own rows. Their names are those of Megatron-LM's mappings.

Outside all ranks compute the same, so a gradient there is whole on every rank. Inside, what is
differentiated is the sum over ranks of each rank's own function. Each mapping has the derivative
that this asks for, which is a mapping, too (Shoeybi et al. 2019, section 3, call two of them f
and g):

    scatter_to_region   <->  gather_from_region
    reduce_from_region  <->  copy_to_region
    a parameter in      <->  the sum over ranks (see `grad_sums`)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.tensors import apply, as_bytes
from instep.distributed.communication.transport import Transport
from instep.training.blocks import Block


def scatter_to_region(whole: Tensor, block: Block, dim: int, transport: Transport) -> Tensor:
    """This rank's rows of a tensor that every rank has; along other dimensions than 0 a copy."""
    if not _needs_grad(whole):
        return _slice_rows(whole, block, dim)
    local: Tensor = apply(_ScatterToRegion, whole, block, dim, transport)
    return local


def gather_from_region(local: Tensor, block: Block, dim: int, transport: Transport) -> Tensor:
    """The rows of all ranks, of which each may have several per sample. Collective."""
    if not _needs_grad(local):
        return gather_rows(local, block, dim, transport)
    whole: Tensor = apply(_GatherFromRegion, local, block, dim, transport)
    return whole


def reduce_from_region(local: Tensor, weight: float, transport: Transport) -> Tensor:
    """The sum over ranks of each one's tensor times its weight. Collective."""
    total: Tensor = apply(_ReduceFromRegion, local, weight, transport)
    return total


def copy_to_region(whole: Tensor, weight: float, transport: Transport) -> Tensor:
    """A tensor that every rank has, times this rank's weight; its gradient is a sum over ranks."""
    part: Tensor = apply(_CopyToRegion, whole, weight, transport)
    return part


def pass_to_region(local: Tensor) -> Tensor:
    """This rank's rows, from one sharded call into the next."""
    same: Tensor = apply(_PassToRegion, local)
    return same


def is_region_input(node: Any) -> bool:
    """Whether this node of the autograd graph is where a tensor came into a sharded call."""
    return isinstance(
        node,
        tuple(
            mapping._backward_cls for mapping in (_ScatterToRegion, _CopyToRegion, _PassToRegion)
        ),
    )


def gather_rows(local: Tensor, block: Block, dim: int, transport: Transport) -> Tensor:
    """`gather_from_region` without a derivative."""
    rows_first = local.detach().movedim(dim, 0).contiguous()
    row_shape, per_sample = rows_first.shape[1:], rows_first.shape[0] // block.count
    most = -(-block.total // block.size) * per_sample
    if rows_first.shape[0] < most:
        padding = rows_first.new_empty((most - rows_first.shape[0], *row_shape))
        rows_first = torch.cat((rows_first, padding))
    parts = transport.all_gather(as_bytes(rows_first))
    rows = [
        part.view(local.dtype).view(most, *row_shape)[
            : Block(r, block.size, block.total).count * per_sample
        ]
        for r, part in enumerate(parts)
    ]
    whole = torch.cat(rows)
    if dim == 0:
        return whole
    return whole.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _slice_rows(whole: Tensor, block: Block, dim: int) -> Tensor:
    per_sample = whole.shape[dim] // block.total
    rows = whole.narrow(dim, block.start * per_sample, block.count * per_sample)
    return rows if dim == 0 else rows.contiguous()


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, block: Block, dim: int, transport: Transport) -> Tensor:
        ctx.block, ctx.dim, ctx.transport = block, dim, transport
        return _slice_rows(whole, block, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather_from_region(grads[0], ctx.block, ctx.dim, ctx.transport), None, None, None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, block: Block, dim: int, transport: Transport) -> Tensor:
        ctx.block, ctx.dim, ctx.transport = block, dim, transport
        return gather_rows(local, block, dim, transport)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_to_region(grads[0], ctx.block, ctx.dim, ctx.transport), None, None, None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, weight: float, transport: Transport) -> Tensor:
        ctx.weight, ctx.transport = weight, transport
        total = (local.detach() * weight).contiguous()
        real = torch.view_as_real(total) if total.is_complex() else total
        transport.all_reduce(real, "sum").wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return copy_to_region(grads[0], ctx.weight, ctx.transport), None, None


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, weight: float, transport: Transport) -> Tensor:
        ctx.weight, ctx.transport = weight, transport
        return whole * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_from_region(grads[0], ctx.weight, ctx.transport), None, None


class _PassToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
