"""The batches that a loop has requested, and how far behind its requests it works."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import ClassVar

import torch

from instep.training.blocks import Block

_MAX_BLOCKS = 1024
"""The blocks of this many batches are kept for each iterator."""


class BatchTracker:
    """The batches that a loop has requested from one iterator, and how far behind them it works.

    A loop that loads ahead works on a batch some requests after its own; its first forward shows
    how many. The iterator is held weakly.
    """

    collectives: ClassVar[int] = 0
    """How many of the script's own collectives there were that a placeholder does not change."""

    def __init__(self, iterator: object, loader: int = -1) -> None:
        """`loader`: the number of the iterator's loader, if it has one."""
        self.loader = loader
        self._iterator = weakref.ref(iterator)
        self._blocks: deque[Block] = deque(maxlen=_MAX_BLOCKS)
        self._largest = 0
        """The most rows that a batch had."""
        self._delivered = 0
        self._requests = 0
        self._thread = threading.get_ident()
        self._has_gradients = True
        """Whether the last request was made with gradients enabled."""
        self._ahead: tuple[int, int] | None = None
        """The fewest and the most requests that can lie between a batch's own and its forward."""
        self._observed = False
        """Whether forwards have shown these bounds, and not just the number of requests."""
        self._collectives_before = BatchTracker.collectives
        self.is_skipped_by_some = False
        """Whether ranks that have no rows of the last batch do not get it."""
        self.has_placeholders = False
        """Whether ranks without rows of a batch have run a placeholder."""

    def request(self, block: Block | None) -> int:
        """The loop gets `block` (None: there are no more batches); returns its index."""
        self._requests += 1
        self._thread = threading.get_ident()
        self._has_gradients = torch.is_grad_enabled()
        if block is not None:
            self._blocks.append(block)
            self._largest = max(self._largest, block.total)
            self._delivered += 1
        else:
            self.is_skipped_by_some = False
        return self._delivered - 1

    def observe(self, index: int) -> None:
        """The loop works on batch `index`."""
        ahead = self._requests - 1 - index
        if self._ahead is None or not self._observed:
            self._ahead = ahead, ahead
        else:
            fewest, most = self._ahead
            self._ahead = min(fewest, ahead), max(most, ahead)
        self._observed = True

    def assume_forward(self) -> None:
        """The loop works on one of the batches that it has requested so far."""
        if self._ahead is None:
            self._ahead = 0, self._requests - 1
            self._observed = self._requests == 1

    def candidates(self) -> list[Block]:
        """The batches that the loop may work on now, oldest first; none after its end."""
        if self.in_other_thread:
            return list(self._blocks)
        fewest, most = self._ahead or (0, self._requests - 1)
        latest = self._requests - 1 - (self._delivered - len(self._blocks))
        first, last = max(latest - most, 0), min(latest - fewest, len(self._blocks) - 1)
        return [self._blocks[k] for k in range(first, last + 1)]

    def yields(self, block: Block) -> bool:
        """Whether the loop gets this block, its next one; sets `is_skipped_by_some`.

        A placeholder is for training, and for loops in which all ranks take part in collectives
        that it does not change (`count_collective`).
        """
        has_placeholders = (
            torch.is_grad_enabled() or BatchTracker.collectives > self._collectives_before
        )
        self.is_skipped_by_some = block.has_empty_ranks and not has_placeholders
        return has_placeholders or not block.is_empty

    @property
    def in_other_thread(self) -> bool:
        """Whether another thread of the script requests batches: then their order says nothing."""
        return self._thread != threading.get_ident()

    def is_short(self, block: Block) -> bool:
        """Whether this is one of its batches, and has fewer rows than another one before."""
        return block.total < self._largest and block in self._blocks

    @property
    def has_mode_of_now(self) -> bool:
        """Whether the last request was made with gradients enabled or disabled, as they are now.

        Another thread has a mode of its own, which says nothing.
        """
        return self.in_other_thread or self._has_gradients == torch.is_grad_enabled()

    @property
    def last(self) -> Block | None:
        """The batch that was registered last."""
        return self._blocks[-1] if self._blocks else None

    @property
    def is_stale(self) -> bool:
        """Whether another loop's request shows that this one has been left."""
        return self._iterator() is None


class ManualBatchTracker(BatchTracker):
    """The batches that a script has sharded itself, by `instep.shard(tensors)`.

    Those sharded since the last backward are candidates for the next one.
    """

    def __init__(self) -> None:
        super().__init__(self)
        self._step_ended = False

    def request(self, block: Block | None) -> int:
        """The script has sharded a batch."""
        if self._step_ended:
            self._blocks.clear()
            self._step_ended = False
            self.has_placeholders = False
        return super().request(block)

    def end_step(self) -> None:
        """A backward has used the batches that were sharded before."""
        self._step_ended = True

    def observe(self, index: int) -> None:
        """A forward says nothing about the other batches of the step."""

    def assume_forward(self) -> None:
        """A forward says nothing about the other batches of the step."""

    def candidates(self) -> list[Block]:
        """The batches of this step."""
        return list(self._blocks)

    @property
    def is_stale(self) -> bool:
        """Whether a loop's request shows that these are no longer in use."""
        return self._step_ended


def count_collective() -> None:
    """The script is about to call a collective that a placeholder does not change."""
    BatchTracker.collectives += 1
