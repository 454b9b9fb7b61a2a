"""The sums over one rank's shards of what each adds to the gradients of parameters.

A sum is made as soon as backward has all shards' parts of it, so these do not live until backward
ends: with V/N shards that would be V/N times the memory of the gradients, none of it in a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.tensors import apply
from instep.unedited.errors import ShardedCallError
from instep.unedited.sharded_call.shards.shard_group import sparse_tree_sum, tree_sum

_GROUP_BYTES = 1 << 20
"""Small parameters are summed together: a node of the graph takes some ten microseconds."""


def alias_for_shards(
    parameters: Sequence[Tensor], shards: int, sequence_number: int
) -> list[list[Tensor]]:
    """For each shard, aliases of these parameters, whose nodes have this number."""
    if shards == 1:
        return [list(parameters)]
    found: list[list[Tensor]] = [[] for _ in range(shards)]
    for group in _groups(parameters):
        aliases = apply(_SumOverShards, shards, *group)
        aliases[0].grad_fn._set_sequence_nr(sequence_number)
        for shard, own in enumerate(found):
            of_shard = aliases[shard::shards]
            count_as_parameters(of_shard, group)
            own.extend(of_shard)
    return found


def count_as_parameters(aliases: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Let aliases have the attributes of their parameters, and be an nn.Parameter for torch."""
    for alias, parameter in zip(aliases, parameters, strict=True):
        vars(alias).update(vars(parameter))
        vars(alias)["_is_param"] = True


def is_alias_for_shard(node: Any) -> bool:
    """Whether this node of the autograd graph is the input of parameters into shards."""
    return isinstance(node, _SumOverShards._backward_cls)


def check_all_sparse(are_sparse: Sequence[bool]) -> None:
    """Raise ShardedCallError unless a parameter's gradients are sparse on all shards or on none."""
    if len(set(are_sparse)) > 1:
        raise ShardedCallError(
            "a gradient is sparse for a part of the batch and dense for another: give "
            "nn.Embedding no sparse=True."
        )


def _groups(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters that follow each other, of at least `_GROUP_BYTES` but the last ones."""
    group: list[Tensor] = []
    size = 0
    for parameter in parameters:
        group.append(parameter)
        size += parameter.nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class _SumOverShards(torch.autograd.Function):
    """An alias of each parameter for each shard, whose gradients are added up along the tree."""

    @staticmethod
    def forward(ctx: Any, shards: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.parameters = shards, parameters
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters for _ in range(shards))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        terms: dict[torch.dtype, dict[int, list[Tensor]]] = {}
        for k, parameter in enumerate(ctx.parameters):
            own = grads[k * ctx.shards : (k + 1) * ctx.shards]
            given = [grad for grad in own if grad is not None]
            if any(grad.is_sparse for grad in given):
                check_all_sparse([grad.is_sparse for grad in given])
                sums[k] = sparse_tree_sum(own)
            elif given:  # zeros where only other shards have one, as on ranks with one shard
                zeros = [] if len(given) == len(own) else [torch.zeros_like(parameter)]
                each = [zeros[0] if grad is None else grad for grad in own]
                terms.setdefault(given[0].dtype, {})[k] = each
        for members in terms.values():
            by_shard = list(zip(*members.values(), strict=True))
            for k, total in zip(members, tree_sum(by_shard), strict=True):
                sums[k] = total
        return None, *sums
