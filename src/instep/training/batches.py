"""The batch to which a forward belongs.

It is known from the batch's own tensors and from whatever shares their memory: views, `detach()`,
NumPy arrays. Where a script gives the model other tensors (a copy on the GPU, noise of the batch's
size), the order of its requests leaves one batch in a plain loop, and several in a loop that loads
ahead or uses several loaders. Among these the number of rows decides. If it does not, that is an
error.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from instep.distributed.communication.transport import get_transport
from instep.errors import TrainingError
from instep.training.blocks import Block, tensor_leaves
from instep.training.errors import UnknownBatchError

_MAX_BLOCKS = 1024
"""The blocks of this many batches are kept for each iterator."""

_collectives = 0
"""How many of the script's own collectives there were that a placeholder does not change."""


class BatchTracker:
    """The batches that a loop has requested from one iterator, and how far behind them it works.

    A loop that loads ahead works on a batch some requests after its own; its first forward shows
    how many. The iterator is held weakly.
    """

    def __init__(self, iterator: object) -> None:
        self._iterator = weakref.ref(iterator)
        self._blocks: deque[Block] = deque(maxlen=_MAX_BLOCKS)
        self._delivered = 0
        self._requests = 0
        self._thread = threading.get_ident()
        self._ahead: tuple[int, int] | None = None
        """The fewest and the most requests that can lie between a batch's own and its forward."""
        self._observed = False
        """Whether forwards have shown these bounds, and not just the number of requests."""
        self._collectives = _collectives
        self.is_skipped_by_some = False
        """Whether ranks that have no rows of the last batch do not get it."""

    def request(self, block: Block | None) -> int:
        """The loop gets `block` (None: there are no more batches); returns its index."""
        self._requests += 1
        self._thread = threading.get_ident()
        if block is not None:
            self._blocks.append(block)
            self._delivered += 1
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
        that it does not change (`note_collective`).
        """
        has_placeholders = torch.is_grad_enabled() or _collectives > self._collectives
        self.is_skipped_by_some = block.total < block.size and not has_placeholders
        return has_placeholders or not block.is_empty

    @property
    def in_other_thread(self) -> bool:
        """Whether another thread of the script requests batches: then their order says nothing."""
        return self._thread != threading.get_ident()

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
        """The one batch. Raises UnknownBatchError.

        Collective where batches of different sizes give some rank the same number of rows.
        """
        if len(self.blocks) == 1:
            return self.blocks[0]
        fits = [block is not None and _rows(block) in self.rows for block in self.blocks]
        if self.same_on_all_ranks and not self._is_decided_by_each_rank():
            fits = _all_reduce_and(fits)
        fitting = [block for block, fit in zip(self.blocks, fits, strict=True) if fit]
        if len(fitting) == 1:
            return fitting[0]
        if len({_fractions(block) for block in self.blocks}) == 1:
            return self.blocks[-1]
        if None in self.blocks and self.rows and not fitting:
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

    def _is_decided_by_each_rank(self) -> bool:
        """Whether on every rank these batches differ in the number of rows."""
        if None in self.blocks:
            return False
        blocks = [block for block in self.blocks if block is not None]
        return all(
            len({_rows(replace(block, rank=rank)) for block in blocks}) == len(blocks)
            for rank in range(blocks[0].size)
        )


def _rows(block: Block) -> int:
    """The rows of this rank's part; a placeholder is one."""
    return max(block.count, 1)


def _fractions(block: Block | None) -> tuple[float, ...]:
    size = get_transport().size
    return (1 / size,) * size if block is None else block.fractions()


def _all_reduce_and(fits: list[bool]) -> list[bool]:
    """For each, whether it is true on every rank. Collective."""
    transport = get_transport()
    counts = torch.tensor(fits, dtype=torch.int64, device=transport.control_device)
    transport.all_reduce(counts, "sum").wait()
    return [count == transport.size for count in counts.tolist()]


# ------------------------------------------------------------------- the batches' own tensors


@dataclass(frozen=True)
class _Part:
    """The bytes of a storage that a registered tensor covers."""

    first: int
    end: int
    tensor: TensorWeakRef
    block: Block
    tracker: BatchTracker
    index: int


_block_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The registered tensors themselves, with their blocks."""
_parts: dict[int, tuple[StorageWeakRef, list[_Part]]] = {}
"""The registered parts of each storage, by its address."""
_trackers: list[BatchTracker] = []
"""Those of iterators that a loop may be using; the one of the last request comes last."""
_manual = ManualBatchTracker()
_requests = 0
_epoch = 0


def register(batch: object, block: Block, tracker: BatchTracker = _manual) -> None:
    """A loop has requested `batch` and works on it now or later."""
    index = _request(tracker, block)
    for leaf in tensor_leaves(batch):
        _block_of[leaf] = block
        covered = _bytes_of(leaf)
        if covered is not None:
            storage = leaf.untyped_storage()
            if storage._cdata not in _parts:
                _parts[storage._cdata] = StorageWeakRef(storage), []
            part = _Part(*covered, TensorWeakRef(leaf), block, tracker, index)
            _parts[storage._cdata][1].append(part)


def register_skipped(block: Block, tracker: BatchTracker) -> None:
    """A loop has skipped a batch of which this rank has no rows."""
    _request(tracker, block)


def register_end(tracker: BatchTracker) -> None:
    """A loop has reached the end of the data."""
    _request(tracker, None)


def note_collective() -> None:
    """The script is about to call, in its loop, a collective that a placeholder does not change.

    Raises TrainingError where ranks without rows of the batch will not come.
    """
    global _collectives
    _collectives += 1
    in_use = [tracker for tracker in _trackers if tracker.candidates()]
    if len(in_use) == 1 and in_use[0].is_skipped_by_some:
        raise TrainingError(
            "the first batch of this loop has fewer rows than there are ranks. Without gradients a "
            "rank without rows skips it, so that not all ranks come to this collective. Put "
            "torch.no_grad() into the loop, or run on fewer ranks."
        )


def end_step() -> None:
    """A backward has ended."""
    _manual.end_step()


def note_epoch(epoch: int) -> None:
    """A loop takes a batch of this epoch of its loader."""
    global _epoch
    if torch.is_grad_enabled() and threading.current_thread() is threading.main_thread():
        _epoch = epoch


def last_epoch() -> int:
    """That of the last batch that the main thread has taken for training; equal on ranks in
    step."""
    return _epoch


def reset() -> None:
    """Forget every batch, and the epoch of the last one."""
    global _epoch
    _epoch = 0
    _trackers.clear()
    _parts.clear()
    _block_of.clear()


def count_requests() -> int:
    """How many batches the main thread has requested from sharded loaders, those of evaluations
    without gradients left out. Ranks in step have requested as many since they began."""
    return _requests


def _request(tracker: BatchTracker, block: Block | None) -> int:
    global _requests
    in_main_thread = threading.current_thread() is threading.main_thread()
    if block is not None and tracker is not _manual and in_main_thread:
        _requests += torch.is_grad_enabled()
    _trackers[:] = [t for t in _trackers if t is not tracker and not t.is_stale] + [tracker]
    for address, (storage, parts) in list(_parts.items()):
        # One storage may hold the whole data set: batches that are gone are not searched there.
        parts[:] = [p for p in parts if p.tracker is not tracker or p.tensor() is not None]
        if not parts or storage.expired():
            del _parts[address]
    return tracker.request(block)


def is_registered(tensor: Tensor) -> bool:
    """Whether this very tensor is a part of a batch that is sharded already."""
    return tensor in _block_of


def find_block(tensor: Tensor) -> Block | None:
    """The block in whose memory this tensor lies."""
    part = _part_of(tensor)
    block: Block | None = _block_of.get(tensor) if part is None else part.block
    return block


def find_candidates(values: object) -> BatchCandidates:
    """The batches to which these inputs may belong: one, if they lie in its memory."""
    tensors = tensor_leaves(values)
    for tensor in tensors:
        part = _part_of(tensor)
        if part is not None:
            part.tracker.observe(part.index)
        block = find_block(tensor)
        if block is not None:
            return BatchCandidates((block,))
    return _candidates(frozenset(tensor.shape[0] for tensor in tensors if tensor.dim()))


def _candidates(rows: frozenset[int]) -> BatchCandidates:
    """The batches that the order of requests leaves."""
    in_use = [tracker for tracker in _trackers if tracker.candidates()]
    if len(in_use) == 1:
        in_use[0].assume_forward()
    blocks: list[Block | None] = [b for tracker in in_use for b in tracker.candidates()]
    if not in_use:
        blocks = [_trackers[-1].last, None] if _trackers else [None]
    same_on_all_ranks = not any(tracker.in_other_thread for tracker in in_use)
    return BatchCandidates(tuple(dict.fromkeys(blocks)), rows, same_on_all_ranks)


def _part_of(tensor: Tensor) -> _Part | None:
    covered = _bytes_of(tensor) if _parts else None
    if covered is None:
        return None
    _, parts = _parts.get(tensor.untyped_storage()._cdata, (None, []))
    first, end = covered
    return next((part for part in reversed(parts) if part.first <= first and end <= part.end), None)


def _bytes_of(tensor: Tensor) -> tuple[int, int] | None:
    """The first byte that a tensor covers in its storage, and the one behind its last.

    None where it covers none, or has no storage (a sparse tensor).
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first, width = int(tensor.storage_offset()), tensor.element_size()
    return first * width, (first + reach + 1) * width
