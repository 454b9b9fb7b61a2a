"""The batches to which a forward may belong, and the choice of one of them by its rows."""

from __future__ import annotations

from dataclasses import dataclass

from instep.distributed.communication.transport import get_transport
from instep.distributed.numbers import each_on_any_rank
from instep.training.blocks import Block
from instep.training.errors import UnknownBatchError

_MAX_VIEWS = 8
"""Inputs may have so many rows for each sample of the batch."""
_SHOWN_BATCHES = 8
"""How many batches an error lists."""


@dataclass(frozen=True)
class BatchCandidates:
    """The batches to which a forward may belong (None: to no batch), and its inputs' rows."""

    blocks: tuple[Block | None, ...]
    rows: frozenset[int] = frozenset()
    same_on_all_ranks: bool = True
    """Whether all ranks have the same candidates, in the same order."""
    earlier: tuple[Block, ...] = ()
    """Where there is one candidate: batches that were requested shortly before it and that the
    ranks divide otherwise. The inputs may be a copy of one that the script has kept."""
    inner: tuple[frozenset[int], ...] = ()
    """For these: the lengths of the inputs in the next dimensions, as many on every rank."""

    @property
    def is_single(self) -> bool:
        """Whether there is one, and no earlier batch that it may be."""
        return len(self.blocks) == 1 and not self.earlier

    @property
    def is_placeholder(self) -> bool:
        """Whether this rank has no rows. Collective where batches have fewer samples than ranks."""
        for each in self.blocks:
            if each is not None and each.has_empty_ranks:
                block = self.resolve()
                return block is not None and block.is_empty
        return False

    def resolve(self) -> Block | None:
        """The one batch. Raises UnknownBatchError. Collective where there are several, or earlier
        ones.

        Inputs that have on every rank as many times the rows of a batch as on the others are made
        of it, too: several views of each sample. Not where they may be of no batch, and a batch
        has fewer samples than ranks: then each has one row, and any number is so many times that.
        """
        if len(self.blocks) == 1:
            return self._resolve_single()
        times = range(1, _MAX_VIEWS + 1) if self.same_on_all_ranks else (1,)
        fits = [
            block is not None
            and views * _rows(block) in self.rows
            and not (views > 1 and block.has_empty_ranks and None in self.blocks)
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
            if fitting:
                break  # more views would choose by chance
        if len({_fractions(block) for block in self.blocks}) == 1:
            return self.blocks[-1]
        if None in self.blocks and self.rows and not any(fits):
            return None
        raise self._error(*self.blocks)

    def _resolve_single(self) -> Block | None:
        """The one candidate, or an earlier batch if only that has the inputs' rows on every rank.
        Collective where there are `earlier` ones."""
        own = self.blocks[0]
        if not self.earlier or own is None:
            return own
        count = _rows(own)
        fits = [views * count in self.rows for views in range(1, _MAX_VIEWS + 1)]
        fits += [_rows(block) in self.rows for block in self.earlier]
        fits += [count in lengths for lengths in self.inner]
        misfits = each_on_any_rank([not fit for fit in fits], get_transport())
        pairs = zip(self.earlier, misfits[_MAX_VIEWS:], strict=False)
        kept = [block for block, misfit in pairs if not misfit]
        if len(kept) != 1 or not misfits[0]:
            return own
        # With as many rows on every rank, the first dimension may be another one, such as time.
        if len({*kept[0].fractions()}) == 1:
            if not all(misfits[_MAX_VIEWS + len(self.earlier) :]):
                return own
            if not all(misfits[:_MAX_VIEWS]):
                raise self._error(own, kept[0])
        return kept[0]

    def _error(self, *blocks: Block | None) -> UnknownBatchError:
        seen = ", ".join(map(str, sorted(self.rows))) or "no"
        known = [block for block in blocks if block is not None]
        shown = [f"one of {block.total} samples ({_rows(block)} here)" for block in known]
        more = [f"{len(shown) - _SHOWN_BATCHES} more"] if len(shown) > _SHOWN_BATCHES else []
        listed = ", ".join([*shown[:_SHOWN_BATCHES], *more])
        return UnknownBatchError(
            f"a forward's inputs have {seen} rows on this rank, and they may belong to different "
            f"batches: {listed}. Its gradient must be weighted by the batch's share, so pass the "
            "model the tensors that the sharded loader yields or views of them; or divide the "
            "other tensors by instep.shard; or, if another object loads ahead of the model, "
            "shard that object: instep.shard(prefetcher)."
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
