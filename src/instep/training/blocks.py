"""Which rows of a batch are this rank's.

Rank r of N holds the contiguous block [r*n//N, (r+1)*n//N) of a batch of n samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

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
        """The first sample that is this rank's."""
        return self.rank * self.total // self.size

    @property
    def stop(self) -> int:
        """The first sample after them."""
        return (self.rank + 1) * self.total // self.size

    @property
    def count(self) -> int:
        """How many samples are this rank's; 0 is possible."""
        return self.stop - self.start

    @property
    def is_empty(self) -> bool:
        """Whether this rank has nothing to do but take part."""
        return self.count == 0

    @property
    def fraction(self) -> float:
        """This rank's fraction of the batch: the weight of its gradient of a mean."""
        return self.count / self.total if self.total else 0.0

    def fractions(self) -> tuple[float, ...]:
        """The fractions of all ranks."""
        return tuple(Block(r, self.size, self.total).fraction for r in range(self.size))

    def slice(self, batch: list[T]) -> list[T]:
        """This rank's samples; for an empty block one ghost sample, which must leave no trace."""
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
    seen = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or type(batch).__name__
    raise CannotShardError(
        f"a batch is tensors with the same number of rows (dimension 0); got {seen}."
    )


def slice_rows(batch: T, block: Block) -> T:
    """A block's rows of every tensor, and of every list that has an entry for each row.

    Tensors become views.
    """

    def part(node: Any) -> Any:
        if isinstance(node, Tensor):
            return node[:1] if block.is_empty else node[block.start : block.stop]
        return block.slice(node)

    def whole(node: Any) -> bool:
        entries = isinstance(node, list) and len(node) == block.total
        return isinstance(node, Tensor) or (entries and not tensor_leaves(node))

    mine: T = tree_map(lambda node: part(node) if whole(node) else node, batch, is_leaf=whole)
    return mine
