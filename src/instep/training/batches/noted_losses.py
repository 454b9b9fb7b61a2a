"""The batches of the losses that had a backward last, for what a script adds up of them.

A loss lies in no batch's memory, and a number has none. Where loops over several loaders are at
work, its backward has told which batch it is of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from torch import Tensor

from instep.distributed.communication.transport import get_transport
from instep.distributed.numbers import each_on_any_rank
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
    """Which of the possible batches a loss is of: by its memory, else by its number, which must be
    that of a loss of one batch on every rank.

    Collective where losses of the possible batches were noted and `value` lies in the memory of
    none: a number may be equal on some ranks by chance, and a rank's only row has the number of its
    mean.
    """
    noted = [(loss, b) for loss, b in reversed(_noted) if {*b.blocks} <= {*possible}]
    for loss, batch in noted:
        if _address(loss) == _address(value):
            return batch
    if not noted:
        return None
    number = value.item() if value.numel() == 1 else None
    misfits = each_on_any_rank([not _is_number(loss, number) for loss, _ in noted], get_transport())
    fitting = (batch for (_, batch), misfit in zip(noted, misfits, strict=True) if not misfit)
    return next(fitting, None)


def _is_number(loss: Tensor, number: float | None) -> bool:
    other = loss.item()
    is_nan = number is not None and number != number  # as a placeholder's may be
    return other == number or (is_nan and other != other)


def are_of_several(possible: Collection[Block | None]) -> bool:
    """Whether losses of several of the possible batches were noted."""
    found = {batch.blocks for _, batch in _noted if {*batch.blocks} <= {*possible}}
    return len(found) > 1


def reset() -> None:
    """Forget them."""
    _noted.clear()


def _address(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
