"""The batches of the losses that had a backward last, for what a script adds up of them.

A loss lies in no batch's memory, and a number has none. Where loops over several loaders are at
work, its backward has told which batch it is of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from torch import Tensor

from instep.training.batches.candidates import BatchCandidates
from instep.training.blocks import Block

_MAX_BYTES = 4096
"""A loss that lies in larger memory is not kept."""
_noted: deque[tuple[Tensor, BatchCandidates]] = deque(maxlen=8)
"""Losses, the last one at the end."""


def note_losses(roots: Iterable[object], batch: BatchCandidates) -> None:
    """Backward is called on these, which are of this batch."""
    for root in roots:
        is_loss = isinstance(root, Tensor) and root.numel() == 1
        if isinstance(root, Tensor) and is_loss and root.untyped_storage().nbytes() <= _MAX_BYTES:
            _noted.append((root.detach(), batch))


def find_noted(value: Tensor, possible: Collection[Block | None]) -> BatchCandidates | None:
    """Which of the possible batches a loss is of: by its memory, else by its number."""
    if value.numel() != 1:
        return None
    noted = [(loss, b) for loss, b in reversed(_noted) if {*b.blocks} <= {*possible}]
    for loss, batch in noted:
        if _address(loss) == _address(value):
            return batch
    number = value.item()
    for loss, batch in noted:
        other = loss.item()
        if other == number or (other != other and number != number):  # a placeholder's may be NaN
            return batch
    return None


def are_of_several(possible: Collection[Block | None]) -> bool:
    """Whether losses of several of the possible batches were noted."""
    found = {batch.blocks for _, batch in _noted if {*batch.blocks} <= {*possible}}
    return len(found) > 1


def reset() -> None:
    """Forget them."""
    _noted.clear()


def _address(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
