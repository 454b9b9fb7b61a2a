"""The rows of a batch that belong to a rank.

Rank r of N holds the contiguous block [r*n//N, (r+1)*n//N) of a batch of n samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from instep.process.torch_private import tree_leaves, tree_map
from instep.training.errors import CannotShardError

T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """A rank's contiguous fraction of a batch of `total` samples."""

    rank: int
    size: int
    total: int

    @property
    def start(self) -> int:
        """The rank's first sample."""
        return self.rank * self.total // self.size

    @property
    def stop(self) -> int:
        """The first sample after the rank's."""
        return (self.rank + 1) * self.total // self.size

    @property
    def count(self) -> int:
        """The number of the rank's samples, which can be 0."""
        return self.stop - self.start

    @property
    def is_empty(self) -> bool:
        """Whether the rank has no samples, and runs only for the collectives."""
        return self.count == 0

    @property
    def fraction(self) -> float:
        """The rank's fraction of the batch: the weight of its gradient of a mean."""
        return self.count / self.total if self.total else 0.0

    def fractions(self) -> tuple[float, ...]:
        """The fractions of all ranks."""
        return tuple(replace(self, rank=r).fraction for r in range(self.size))

    def slice(self, batch: list[T]) -> list[T]:
        """The rank's samples; for an empty block one placeholder, which must leave no trace."""
        return batch[:1] if self.is_empty else batch[self.start : self.stop]


def tensor_leaves(batch: object) -> list[Tensor]:
    """The tensors of a nested batch."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def count_rows(batch: object) -> int:
    """How many samples a batch has: the length of dimension 0 of its tensors.

    Raises CannotShardError when they differ, or when there are none.
    """
    tensors = tensor_leaves(batch)
    lengths = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(lengths) == 1 and None not in lengths:
        return tensors[0].shape[0]
    if not tensors and isinstance(batch, list):
        return len(batch)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or type(batch).__name__
    raise CannotShardError(
        f"a batch is tensors with the same number of rows (dimension 0); got {shapes}."
    )


def slice_rows(batch: T, block: Block) -> T:
    """A block's rows of every tensor, as views; and of every list, NumPy array and tuple of strings
    with an entry for each row."""

    def local_rows(node: Any) -> Any:
        if isinstance(node, Tensor):
            return node[:1] if block.is_empty else node[block.start : block.stop]
        return block.slice(node)

    def has_rows(node: Any) -> bool:
        if isinstance(node, np.ndarray):
            return node.ndim > 0 and len(node) == block.total
        is_column = type(node) is tuple and all(isinstance(entry, str) for entry in node)
        entries = (isinstance(node, list) or is_column) and len(node) == block.total
        return isinstance(node, Tensor) or (entries and not tensor_leaves(node))

    local: T = tree_map(
        lambda node: local_rows(node) if has_rows(node) else node, batch, is_leaf=has_rows
    )
    return local
