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

from instep.distributed.communication.transport import Transport
from instep.process import settings
from instep.training.blocks import Block

_SUMMED_BY_TREE = (torch.float32, torch.float64)


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
        return [Block(shard, self.size, total) for shard in self.own]

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Every shard's tensor, from those of this rank's, of one shape. Collective."""
        if len(tensors) == 1:
            return self.transport.all_gather(tensors[0])
        by_rank = self.transport.all_gather(torch.stack(list(tensors)))
        return [part for parts in by_rank for part in parts]

    def sum(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sum over all shards, from the tensors of this rank's, which it overwrites.

        They are contiguous and of one shape and dtype. Collective.
        """
        total = _tree_sum(tensors)
        if not self.is_virtual or (self.transport.in_place and total.dtype in _SUMMED_BY_TREE):
            self.transport.all_reduce(total, "sum").wait()
            return total
        return _tree_sum(self.transport.all_gather(total))


def _tree_sum(tensors: Sequence[Tensor]) -> Tensor:
    """((0 + 1) + (2 + 3)) + ..., in the memory of the first ones."""
    sums = list(tensors)
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [left.add_(right) for left, right in pairs]
    return sums[0]
