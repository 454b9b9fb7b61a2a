"""The batches to which a forward may belong, and the choice of one of them by its rows."""

from __future__ import annotations

from dataclasses import dataclass

from instep.distributed.communication.transport import get_transport
from instep.distributed.numbers import each_on_any_rank
from instep.training.blocks import Block
from instep.training.errors import UnknownBatchError

_MAX_VIEWS = 8
"""Inputs may have so many rows for each sample of the batch."""


@dataclass(frozen=True)
class BatchCandidates:
    """The batches to which a forward may belong (None: to no batch), and its inputs' rows."""

    blocks: tuple[Block | None, ...]
    rows: frozenset[int] = frozenset()
    same_on_all_ranks: bool = True
    """Whether all ranks have the same candidates, in the same order."""

    @property
    def is_placeholder(self) -> bool:
        """Whether this rank has no rows. Collective where batches have fewer samples than ranks."""
        sparse = any(block is not None and block.total < block.size for block in self.blocks)
        block = self.resolve() if sparse else None
        return block is not None and block.is_empty

    def resolve(self) -> Block | None:
        """The one batch. Raises UnknownBatchError. Collective where there are several candidates.

        Inputs that have on every rank as many times the rows of a batch as on the others are made
        of it, too: several views of each sample.
        """
        if len(self.blocks) == 1:
            return self.blocks[0]
        times = range(1, _MAX_VIEWS + 1) if self.same_on_all_ranks else (1,)
        fits = [
            block is not None and views * _rows(block) in self.rows
            for views in times
            for block in self.blocks
        ]
        if self.same_on_all_ranks:
            misfits = each_on_any_rank([not fit for fit in fits], get_transport())
            fits = [not misfit for misfit in misfits]
        for k in range(0, len(fits), len(self.blocks)):
            fitting = [block for block, fit in zip(self.blocks, fits[k:], strict=False) if fit]
            if fitting and len({_fractions(block) for block in fitting}) == 1:
                return fitting[-1]
        if len({_fractions(block) for block in self.blocks}) == 1:
            return self.blocks[-1]
        if None in self.blocks and self.rows and not any(fits):
            return None
        raise UnknownBatchError(
            sorted(self.rows), [(b.total, _rows(b)) for b in self.blocks if b is not None]
        )

    def resolve_on_this_rank(self) -> Block | None:
        """The one batch; None if this rank cannot tell by itself. Not collective."""
        if len(self.blocks) == 1:
            return self.blocks[0]
        fitting = [b for b in self.blocks if b is not None and _rows(b) in self.rows]
        return fitting[0] if len(fitting) == 1 else None


def _rows(block: Block) -> int:
    """The rows of this rank's part; a placeholder is one."""
    return max(block.count, 1)


def _fractions(block: Block | None) -> tuple[float, ...]:
    size = get_transport().size
    return (1 / size,) * size if block is None else block.fractions()
