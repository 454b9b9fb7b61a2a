"""The rows of a batch that belong to a rank.

Rank r of N holds the contiguous block [r*n//N, (r+1)*n//N) of a batch of n samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from torch import Tensor

from instep.process.torch_private.tensors import tree_leaves

T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """A rank's contiguous fraction of a batch of `total` samples."""

    rank: int
    size: int
    total: int

    @cached_property
    def start(self) -> int:
        """The rank's first sample."""
        return self.rank * self.total // self.size

    @cached_property
    def stop(self) -> int:
        """The first sample after the rank's."""
        return (self.rank + 1) * self.total // self.size

    @cached_property
    def count(self) -> int:
        """The number of the rank's samples, which can be 0."""
        return self.stop - self.start

    @property
    def is_empty(self) -> bool:
        """Whether the rank has no samples, and runs only for the collectives."""
        return self.count == 0

    @property
    def has_empty_ranks(self) -> bool:
        """Whether there are ranks without samples of this batch."""
        return self.total < self.size

    @property
    def fraction(self) -> float:
        """The rank's fraction of the batch: the weight of its gradient of a mean."""
        return self.count / self.total if self.total else 0.0

    def fractions(self) -> tuple[float, ...]:
        """The fractions of all ranks."""
        return tuple(block.fraction for block in blocks_of(self.size, self.total))

    def slice(self, batch: list[T]) -> list[T]:
        """The rank's samples; for an empty block one placeholder, which must leave no trace."""
        return batch[:1] if self.is_empty else batch[self.start : self.stop]


@lru_cache(maxsize=64)
def blocks_of(size: int, total: int) -> tuple[Block, ...]:
    """The blocks of all ranks."""
    return tuple(Block(rank, size, total) for rank in range(size))


def is_record(value: object) -> bool:
    """Whether this is an object of a dataclass."""
    return is_dataclass(value) and not isinstance(value, type)


def batch_leaves(batch: object) -> Iterator[object]:
    """What a nested batch consists of; dataclasses may be a part of it."""
    for leaf in tree_leaves(batch):
        if is_record(leaf):
            for field in fields(leaf):
                yield from batch_leaves(getattr(leaf, field.name))
        else:
            yield leaf


def tensor_leaves(batch: object) -> list[Tensor]:
    """The tensors of a nested batch."""
    return [leaf for leaf in batch_leaves(batch) if isinstance(leaf, Tensor)]
