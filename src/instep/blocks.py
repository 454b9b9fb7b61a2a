"""Which rows of a batch are this rank's, and which batch a forward belongs to.

Rank r of N holds the contiguous block [r*n//N, (r+1)*n//N) of a batch of n samples. The block is
remembered for the batch's tensors themselves; where a script hands the model something else (a
copy on the GPU, noise of the batch's size), the order in which batches were taken tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """A rank's contiguous share of a batch of `total` samples."""

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
    def empty(self) -> bool:
        """Whether this rank has nothing to do but take part."""
        return self.count == 0

    @property
    def share(self) -> float:
        """This rank's fraction of the batch: the weight of its gradient of a mean."""
        return self.count / self.total if self.total else 0.0

    def shares(self) -> tuple[float, ...]:
        """The fractions of all ranks."""
        return tuple(Block(r, self.size, self.total).share for r in range(self.size))

    def rows(self, batch: list[T]) -> list[T]:
        """This rank's samples; for an empty block one ghost sample, which must leave no trace."""
        return batch[:1] if self.empty else batch[self.start : self.stop]


class Deliveries:
    """The batches that a loop has taken from one iterator, in order.

    `taken` counts the loop's requests, `ahead` how many batches it had fetched beyond the first
    when it first called a model: a prefetching loop stays that far ahead until the data end.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._dropped = 0
        self._taken = 0
        self._ahead: int | None = None

    def take(self, block: Block | None) -> None:
        """The loop asked for a batch and got `block`'s, or learnt that there are no more."""
        self._taken += 1
        if block is not None:
            self._blocks.append(block)
        if self._ahead is not None:
            outdated = max(0, len(self._blocks) - self._ahead - 1)
            del self._blocks[:outdated]
            self._dropped += outdated

    def of_next_forward(self) -> Block:
        """The block of the batch that the loop works on now."""
        if self._ahead is None:
            self._ahead = self._taken - 1
        index = self._taken - 1 - self._ahead - self._dropped
        return self._blocks[min(index, len(self._blocks) - 1)]


_of_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_latest: Deliveries | None = None
_forwards: list[Block | None] = []


def deliver(batch: object, block: Block | None, deliveries: Deliveries) -> None:
    """Note that a loop has taken `batch` (or, with no block, reached the end of the data)."""
    global _latest
    deliveries.take(block)
    if block is None:
        return
    _latest = deliveries
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            _of_tensor[leaf] = block


def block_of(values: object) -> Block | None:
    """The block that these inputs belong to; None when no batch was ever divided."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and (block := known_block(leaf)) is not None:
            return block
    return _latest.of_next_forward() if _latest is not None else None


def known_block(tensor: Tensor) -> Block | None:
    """The block whose tensor, or view of it, this is."""
    for candidate in (tensor, tensor._base):
        if candidate is not None and candidate in _of_tensor:
            block: Block = _of_tensor[candidate]
            return block
    return None


def enter_forward(values: object) -> None:
    """A replicated module is being called with these inputs; nests."""
    _forwards.append(block_of(values))


def leave_forward() -> Block | None:
    """The call has ended; returns its block."""
    return _forwards.pop()


def inside_forward() -> bool:
    """Whether a replicated module is being called."""
    return bool(_forwards)


def current_block() -> Block | None:
    """The block that this rank works on now."""
    return _forwards[-1] if _forwards else block_of(())


# ----------------------------------------------------------------------- marks on the graph

_MARK = "instep.block"


def mark(outputs: object, block: Block | None) -> None:
    """Remember on the autograd graph itself that these outputs come from `block`."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            _metadata(leaf.grad_fn)[_MARK] = block


def _metadata(node: Any) -> dict[str, Any]:
    notes: dict[str, Any] = node.metadata  # torch's stub calls this property a method
    return notes


def marks_below(
    roots: Iterable[Tensor], parameters: WeakTensorKeyDictionary
) -> tuple[set[Block | None], bool]:
    """Which forwards these tensors were computed from, and whether `parameters` were used.

    Walks the graph from the roots down to marked outputs: in a training step a handful of nodes.
    """
    found: set[Block | None] = set()
    touched = False
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        notes = _metadata(node)
        if _MARK in notes:
            found.add(notes[_MARK])
            touched = True
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and variable in parameters:
            touched = True
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return found, touched


def tensors_of(batch: object) -> list[Tensor]:
    """The tensors of a nested batch."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
