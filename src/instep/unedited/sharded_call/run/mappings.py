"""Mappings between the script, in which every rank has the whole batch, and a sharded call, in
which each has its own rows. Their names are those of Megatron-LM's mappings.

Outside all ranks compute the same, so a gradient there is whole on every rank. Inside, what is
differentiated is the sum over shards of each one's own function. A rank has one shard, or several
(`shards`), which one node of the graph takes or gives together. Each mapping has the derivative
that this asks for, which is a mapping, too (Shoeybi et al. 2019, section 3, call two of them f
and g):

    scatter_to_region   <->  gather_from_region
    scatter_entries     <->  gather_entries
    reduce_from_region  <->  copy_to_region
    reduce_in_region    <->  reduce_in_region
    a parameter in      <->  the sum over shards (see `grad_sums`)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.tensors import apply, as_bytes
from instep.training.blocks import Block, blocks_of
from instep.training.pytree import flatten, unflatten
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.plan.sharding_plan import MemoryOrder
from instep.unedited.sharded_call.shards.node_names import named_like
from instep.unedited.sharded_call.shards.shard_group import ShardGroup


def scatter_to_region(
    whole: Tensor, blocks: Sequence[Block], dim: int, group: ShardGroup
) -> tuple[Tensor, ...]:
    """The rows of these blocks: a view if `dim` is 0 and shards are ranks, else copies."""
    if not _needs_grad(whole):
        return _slice_rows(whole, blocks, dim, group)
    parts: tuple[Tensor, ...] = apply(_ScatterToRegion, whole, blocks, dim, group)
    return parts


def gather_from_region(
    parts: Sequence[Tensor],
    blocks: Sequence[Block],
    dim: int,
    group: ShardGroup,
    order: MemoryOrder | None = None,
) -> Tensor:
    """The rows of all shards, of which each may have several per sample. Collective."""
    if not any(map(_needs_grad, parts)):
        return gather_rows(parts, blocks, dim, group, order)
    gather = named_like(_GatherFromRegion, parts[0])
    whole: Tensor = apply(gather, blocks, dim, group, order, *parts)
    return whole


def reduce_from_region(
    parts: Sequence[Tensor], weights: Sequence[float], group: ShardGroup
) -> Tensor:
    """The sum over shards of each one's tensor times its weight. Collective."""
    total: Tensor = apply(named_like(_ReduceFromRegion, parts[0]), weights, group, *parts)
    return total


def copy_to_region(
    whole: Tensor, weights: Sequence[float], group: ShardGroup
) -> tuple[Tensor, ...]:
    """For each shard a tensor that every rank has, times its weight; its gradient is a sum."""
    parts: tuple[Tensor, ...] = apply(_CopyToRegion, whole, weights, group)
    return parts


def reduce_in_region(parts: Sequence[Tensor], group: ShardGroup) -> tuple[Tensor, ...]:
    """For each shard the sum over shards; its gradient is a sum over shards, too. Collective."""
    totals: tuple[Tensor, ...] = apply(named_like(_ReduceInRegion, parts[0]), group, *parts)
    return totals


def pass_to_region(local: Tensor) -> Tensor:
    """This rank's rows, from one sharded call into the next."""
    same: Tensor = apply(_PassToRegion, local)
    return same


def scatter_entries(whole: Sequence[Any], block: Block, group: ShardGroup) -> list[Any]:
    """The entries of this block, of a list with one for each row, in which may be tensors."""
    entries = [flatten(entry) for entry in whole]
    trained = [[x for x in leaves if _is_trained(x)] for leaves, _ in entries]
    counts = [len(each) for each in trained]
    if not any(counts):
        return list(whole[block.start : block.stop])
    start, stop = sum(counts[: block.start]), sum(counts[: block.stop])
    own = iter(apply(_ScatterEntries, start, stop, group, *chain(*trained)))
    return [
        unflatten([next(own) if _is_trained(x) else x for x in leaves], structure)
        for leaves, structure in entries[block.start : block.stop]
    ]


def gather_entries(own: Sequence[Any], group: ShardGroup) -> list[Any]:
    """The entries of all shards' lists, from those of this rank's, which may have tensors of any
    shapes in them. Collective."""
    leaves, structure = flatten(list(own))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    wholes = iter(apply(_GatherEntries, group, *tensors))
    places = [_Placeholder.OF_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    by_rank = group.transport.all_gather_object(unflatten(places, structure))
    places, structure = flatten(list(chain(*by_rank)))
    whole: list[Any] = unflatten(
        [next(wholes) if each is _Placeholder.OF_TENSOR else each for each in places], structure
    )
    return whole


class _Placeholder(Enum):
    """In place of a tensor, which is sent otherwise."""

    OF_TENSOR = auto()


def is_region_input(node: Any) -> bool:
    """Whether this node of the autograd graph is where a tensor came into a sharded call."""
    return isinstance(
        node,
        tuple(
            mapping._backward_cls
            for mapping in (_ScatterToRegion, _ScatterEntries, _CopyToRegion, _PassToRegion)
        ),
    )


def gather_rows(
    parts: Sequence[Tensor],
    blocks: Sequence[Block],
    dim: int,
    group: ShardGroup,
    order: MemoryOrder | None = None,
) -> Tensor:
    """`gather_from_region` without a derivative. None: in the order of this rank's first part."""
    first = blocks[0]
    per_sample = parts[0].shape[dim] // first.count
    most = -(-first.total // first.size) * per_sample
    padded = []
    for part in parts:
        rows = part.detach().movedim(dim, 0).contiguous()
        row_shape = rows.shape[1:]
        if rows.shape[0] < most:
            rows = torch.cat((rows, rows.new_empty((most - rows.shape[0], *row_shape))))
        padded.append(as_bytes(rows))
    whole = torch.cat(
        [
            rows.view(parts[0].dtype).view(most, *row_shape)[: block.count * per_sample]
            for block, rows in zip(
                blocks_of(first.size, first.total), group.all_gather(padded), strict=True
            )
        ]
    )
    if dim != 0:
        whole = whole.movedim(0, dim).clone(memory_format=torch.contiguous_format)
    order = order or memory_order(parts[0])
    if order == (*range(whole.dim()),):
        return whole
    inverse = sorted(range(whole.dim()), key=order.__getitem__)
    return whole.permute(order).contiguous().permute(inverse)


def memory_order(tensor: Tensor) -> MemoryOrder:
    """By its strides. They do not tell where a dimension of length 1 lies, such as that of the rows
    of a rank that has one."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return (*range(tensor.dim()),)
    strides = tensor.stride()
    return (*sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)),)


def _slice_rows(
    whole: Tensor, blocks: Sequence[Block], dim: int, group: ShardGroup
) -> tuple[Tensor, ...]:
    per_sample = whole.shape[dim] // blocks[0].total
    rows = [(block.start * per_sample, block.count * per_sample) for block in blocks]
    if whole.layout is torch.sparse_coo:
        return tuple(whole.narrow_copy(dim, *each) for each in rows)
    parts = [whole.narrow(dim, *each) for each in rows]
    if group.is_virtual:  # strides and alignment choose kernels, and with them bits
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
    return (parts[0] if dim == 0 else parts[0].contiguous(),)


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and _needs_grad(value)


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, blocks: Sequence[Block], dim: int, group: ShardGroup
    ) -> tuple[Tensor, ...]:
        ctx.blocks, ctx.dim, ctx.group = blocks, dim, group
        return _slice_rows(whole, blocks, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather_from_region(grads, ctx.blocks, ctx.dim, ctx.group), None, None, None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[Block],
        dim: int,
        group: ShardGroup,
        order: MemoryOrder | None,
        *parts: Tensor,
    ) -> Tensor:
        ctx.blocks, ctx.dim, ctx.group = blocks, dim, group
        return gather_rows(parts, blocks, dim, group, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *scatter_to_region(grads[0], ctx.blocks, ctx.dim, ctx.group)


class _ScatterEntries(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, start: int, stop: int, group: ShardGroup, *whole: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in whole[start:stop])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *apply(_GatherEntries, ctx.group, *grads)


class _GatherEntries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ShardGroup, *own: Tensor) -> tuple[Tensor, ...]:
        trained = list(ctx.needs_input_grad[1:])
        sent = [tensor.detach().cpu().clone() for tensor in own]
        devices = [tensor.device.type for tensor in own]
        by_rank = group.transport.all_gather_object((sent, devices, trained))
        if len({any(trained) for _, _, trained in by_rank}) > 1:
            raise ShardedCallError("tensors in its lists require gradients on some ranks only")
        rank, counts = group.transport.rank, [len(sent) for sent, _, _ in by_rank]
        ctx.start, ctx.stop, ctx.group = sum(counts[:rank]), sum(counts[: rank + 1]), group
        whole = [
            tensor.to(device)
            for sent, devices, _ in by_rank
            for tensor, device in zip(sent, devices, strict=True)
        ]
        flags = chain(*(trained for _, _, trained in by_rank))
        ctx.mark_non_differentiable(*(x for x, flag in zip(whole, flags, strict=True) if not flag))
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *apply(_ScatterEntries, ctx.start, ctx.stop, ctx.group, *grads)


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Sequence[float], group: ShardGroup, *parts: Tensor) -> Tensor:
        ctx.weights, ctx.group = weights, group
        return _sum_over_shards(
            [part.detach() * weight for part, weight in zip(parts, weights, strict=True)], group
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *copy_to_region(grads[0], ctx.weights, ctx.group)


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, weights: Sequence[float], group: ShardGroup
    ) -> tuple[Tensor, ...]:
        ctx.weights, ctx.group = weights, group
        return tuple(whole * weight for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_from_region(grads, ctx.weights, ctx.group), None, None


class _ReduceInRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ShardGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        total = _sum_over_shards([part.detach().clone() for part in parts], group)
        return tuple(total.clone() for _ in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *reduce_in_region(grads, ctx.group)


def _sum_over_shards(tensors: Sequence[Tensor], group: ShardGroup) -> Tensor:
    parts = [tensor.contiguous() for tensor in tensors]
    if not parts[0].is_complex():
        return group.sum(parts)
    return torch.view_as_complex(group.sum([torch.view_as_real(part) for part in parts]))


class _PassToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
