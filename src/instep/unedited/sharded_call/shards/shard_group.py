"""Collectives between the shards of a batch, of which each rank holds one or several.

A sum is along one fixed binary tree over all shards, so that its bits do not depend on the number
of ranks: each rank adds up its own shards, which are a subtree, and the ranks are the leaves of
the tree that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from instep.distributed import numbers
from instep.distributed.communication.tensors import make_sparse
from instep.distributed.communication.transport import Transport, get_transport
from instep.distributed.numbers import Doubles, Numbers
from instep.process import settings
from instep.process.torch_private.tensors import foreach_add, foreach_add_
from instep.training.blocks import Block, blocks_of

_SUMMED_BY_TREE = (torch.float32, torch.float64)
"""What ranks of one host add up in shared memory, along the same tree (`shm.memory.reduction`)."""


@dataclass(frozen=True)
class ShardGroup:
    """All shards of each batch, and those of this rank."""

    transport: Transport
    size: int
    """The number of shards: a multiple of the number of ranks."""
    is_virtual: bool
    """Whether it is the same on any number of ranks, so that bits must not depend on that."""

    @classmethod
    def of(cls, transport: Transport) -> ShardGroup:
        """One shard for each rank, or as many as INSTEP_BITWISE says."""
        fixed = int(settings.BITWISE)
        return cls(transport, fixed or transport.size, fixed > 0)

    @cached_property
    def own(self) -> range:
        """The numbers of this rank's shards."""
        each = self.size // self.transport.size
        return range(self.transport.rank * each, (self.transport.rank + 1) * each)

    def blocks(self, total: int) -> list[Block]:
        """The rows of this rank's shards of a batch with `total` rows."""
        return list(blocks_of(self.size, total)[self.own.start : self.own.stop])

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Every shard's tensor, from those of this rank's, of one shape. Collective."""
        if len(tensors) == 1:
            return self.transport.all_gather(tensors[0])
        by_rank = self.transport.all_gather(torch.stack(list(tensors)))
        return [part for parts in by_rank for part in parts]

    def gather_numbers(self, by_shard: Sequence[Numbers]) -> Numbers:
        """Every shard's numbers, in rows, from those of this rank's shards. Collective."""
        if len(by_shard) == 1:
            return numbers.gather(by_shard[0], self.transport)
        own = numbers.concatenate(by_shard)
        return numbers.gather(own, self.transport).reshape(self.size, -1)

    def sum_numbers(self, by_shard: Sequence[Numbers]) -> Numbers:
        """The sum over all shards, from the numbers of this rank's, which it may overwrite.
        Collective."""
        if self.is_virtual:  # in the order of the shards, whatever the number of ranks
            return self.gather_numbers(by_shard).sum(0)
        return numbers.sum_over_ranks(by_shard[0], self.transport)

    def gather_doubles(self, by_shard: Sequence[Doubles]) -> Doubles:
        """Every shard's numbers, one shard's after another's. Collective."""
        return numbers.gather_doubles(b"".join(by_shard), self.transport)

    def terms_over_shards(self, by_shard: Sequence[Doubles]) -> Doubles:
        """Terms of the sum over all shards, one after another: one or several. Collective."""
        if self.is_virtual:
            return self.gather_doubles(by_shard)
        return numbers.terms_over_ranks(by_shard[0], self.transport)

    def sum(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sum over all shards, from the tensors of this rank's, which it may overwrite.

        They are contiguous and of one shape and dtype. Collective.
        """
        if self.is_virtual:
            return self.sum_each([[tensor] for tensor in tensors])[0]
        self.transport.all_reduce(tensors[0], "sum").wait()
        return tensors[0]

    def sum_each(self, by_shard: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The sums over virtual shards of each of several tensors, from those of this rank's.

        The tensors have one dtype, and are only read. Collective.
        """
        return self.sum_over_ranks(tree_sum(by_shard))

    def sum_over_ranks(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all shards, from those over this rank's, which may be overwritten.

        Collective.
        """
        totals = [total.contiguous() for total in own]
        if self.transport.in_place and totals[0].dtype in _SUMMED_BY_TREE:
            self.transport.all_reduce_each(totals, "sum")
            return totals
        flat = torch.cat([total.view(-1) for total in totals])
        (flat,) = tree_sum([[part] for part in self.transport.all_gather(flat)])
        parts = flat.split([total.numel() for total in totals])
        return [part.view(total.shape) for part, total in zip(parts, totals, strict=True)]

    def sum_sparse_over_ranks(self, own: Tensor | None, device: torch.device) -> Tensor | None:
        """As `sum_over_ranks`, of a sparse tensor; None from ranks without one. Collective."""
        mine = None
        if own is not None:
            own = own.coalesce()
            mine = own.indices().cpu(), own.values().to("cpu"), own.shape
        found = self.transport.all_gather_object(mine)
        return sparse_tree_sum([part and make_sparse(*part).to(device) for part in found])


class GroupOfWorld:
    """The group over all ranks. It is made anew only where their transport is another one."""

    def __init__(self) -> None:
        self._group: ShardGroup | None = None

    def now(self) -> ShardGroup:
        """The group. Joins the process group if need be."""
        transport = get_transport()
        if self._group is None or self._group.transport is not transport:
            self._group = ShardGroup.of(transport)
        return self._group


def tree_sum(terms: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """((0 + 1) + (2 + 3)) + ... of lists of tensors, as new tensors; differentiable."""
    if len(terms) == 1:
        return [tensor.clone() for tensor in terms[0]]
    sums = [list(tensors) for tensors in terms]
    in_place = False  # the terms themselves are only read
    while len(sums) > 1:
        pairs = list(zip(sums[::2], sums[1::2], strict=True))
        if in_place and not torch.is_grad_enabled():
            for left, right in pairs:
                foreach_add_(left, right)
            sums = sums[::2]
        else:
            sums = [list(foreach_add(left, right)) for left, right in pairs]
        in_place = True
    return sums[0]


def sparse_tree_sum(terms: Sequence[Tensor | None]) -> Tensor | None:
    """As `tree_sum`, of sparse tensors of one shape; None adds nothing. Coalesced."""
    sums = [None if term is None else term.coalesce() for term in terms]
    while len(sums) > 1:
        sums = [
            (right if left is None else left)
            if left is None or right is None
            else (left + right).coalesce()
            for left, right in zip(sums[::2], sums[1::2], strict=True)
        ]
    return sums[0]
