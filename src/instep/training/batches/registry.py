"""The batches that are in use: their memory, and the loops that have requested them."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from instep.distributed.communication.exchanges import before_collectives, before_values
from instep.distributed.communication.scopes import scope_number
from instep.distributed.flight_record.script_line import (
    location,
    user_frame,
    warn_at_script_line,
)
from instep.errors import TrainingError
from instep.process.patching import PatchHandle, patches
from instep.process.process_value import ProcessValue
from instep.process.torch_private.autograd import is_transformed, unwrap_transformed
from instep.training.batches import loop_ends, noted_losses, progress
from instep.training.batches.candidates import BatchCandidates
from instep.training.batches.trackers import BatchTracker, ManualBatchTracker, count_collective
from instep.training.blocks import Block, tensor_leaves


@dataclass(frozen=True)
class _Part:
    """The bytes of a storage that a registered tensor covers."""

    first: int
    end: int
    tensor: weakref.ref[Tensor]
    """It calls `_note_gone`."""
    block: Block
    tracker: BatchTracker
    index: int


_block_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The registered tensors themselves, with their blocks."""
_parts: dict[int, tuple[StorageWeakRef, dict[int, _Part]]] = {}
"""The registered parts of each storage, by its address; each has a number."""
_numbers = itertools.count()
_gone: deque[tuple[int, int]] = deque()
"""The addresses and numbers of the parts whose tensors are gone."""
_trackers: list[BatchTracker] = []
"""Those of iterators that a loop may be using; the one of the last request comes last."""
_manual = ProcessValue(ManualBatchTracker())
_warned: set[str] = set()
"""The lines of which there was a warning."""
_past: dict[Block, None] = {}
"""The batches that were requested, one of each size."""
_MAX_PAST = 256
_recent: deque[Block] = deque(maxlen=4)
"""The last batches that were requested with gradients enabled."""


def register(batch: object, block: Block, tracker: BatchTracker | None = None) -> None:
    """A loop has requested `batch` and works on it now or later."""
    tracker = _manual.value if tracker is None else tracker
    index = _request(tracker, block)
    if block.has_empty_ranks:
        tracker.has_placeholders |= not tracker.is_skipped_by_some
        _follow_torch_distributed()
    for leaf in tensor_leaves(batch):
        _block_of[leaf] = block
        covered = _bytes_of(leaf)
        if covered is not None:
            storage = leaf.untyped_storage()
            if storage._cdata not in _parts:
                _parts[storage._cdata] = StorageWeakRef(storage), {}
            key = storage._cdata, next(_numbers)
            gone = functools.partial(_note_gone, key)
            part = _Part(*covered, weakref.ref(leaf, gone), block, tracker, index)
            _parts[key[0]][1][key[1]] = part


def _note_gone(key: tuple[int, int], _: weakref.ref[Tensor]) -> None:
    _gone.append(key)


def register_skipped(block: Block, tracker: BatchTracker) -> None:
    """A loop has skipped a batch of which this rank has no rows."""
    _request(tracker, block)


def register_end(tracker: BatchTracker) -> None:
    """A loop has reached the end of the data."""
    _request(tracker, None)
    loop_ends.note_end(tracker.loader)


def note_collective() -> None:
    """The script is about to call, in its loop, a collective that a placeholder does not change.

    Raises TrainingError where ranks without rows of the batch will not come.
    """
    if scope_number() is not None:  # the other ranks know nothing of it
        return
    count_collective()
    in_use = [each for each in _trackers if each.candidates() and not each.is_stale]
    if len(in_use) == 1 and in_use[0].is_skipped_by_some:
        raise TrainingError(
            "the first batch of this loop has fewer rows than there are ranks. Without gradients a "
            "rank without rows skips it, so that not all ranks come to this collective. Put "
            "torch.no_grad() into the loop, or run on fewer ranks."
        )


def _check_collective() -> None:
    """Raise TrainingError where ranks without rows have skipped the batch of a loop, and will not
    come to a collective in it."""
    if scope_number() is not None or not _trackers:
        return
    last = _trackers[-1]
    if last.is_skipped_by_some and last.candidates() and not last.is_stale:
        raise TrainingError(
            "a batch of this loop has fewer rows than there are ranks. Without gradients a rank "
            "without rows skips it, so that not all ranks come to this collective. Add up in the "
            "loop and call the collective after it, use instep.Mean or instep.gather_rows in every "
            "batch, or run on fewer ranks."
        )


before_collectives.append(_check_collective)


def _look_for_placeholders(*, reduces: bool) -> None:
    """Warn, once for each line, of a collective of what was computed from placeholders, too: in the
    loop, and after it if it reduces."""
    if scope_number() is not None or not _trackers or not _trackers[-1].has_placeholders:
        return
    last = _trackers[-1]
    in_loop = not last.is_stale and any(block.has_empty_ranks for block in last.candidates())
    if not (reduces or in_loop):
        return
    line = location(user_frame(sys._getframe()))
    if line not in _warned:
        _warned.add(line)
        warn_at_script_line(
            "This line takes values of all ranks in or after a loop over batches of which one has "
            "fewer rows than there are ranks. Ranks without rows run a placeholder in its place, "
            "of which len(x) is 1 too: what the script computes from it counts here. instep.Mean, "
            "instep.Metric and instep.gather_rows leave it out. [INS709]"
        )


before_values.append(_look_for_placeholders)


def _check_and_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _check_collective()
    return original(*args, **kwargs)


def _look_and_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _check_collective()
    _look_for_placeholders(reduces=True)
    return original(*args, **kwargs)


@functools.cache
def _follow_torch_distributed() -> None:
    """Look for placeholders, and for ranks that will not come, before the script's calls of
    torch.distributed, too, as those of torchmetrics are; from now on."""
    names = "all_reduce reduce all_gather all_gather_into_tensor gather all_gather_object"
    others = "barrier broadcast broadcast_object_list scatter reduce_scatter all_to_all"
    reason = "ranks without rows do not come, or what they have computed counts there"
    rows = (dist, names, _look_and_call), (dist, others, _check_and_call)
    PatchHandle(patches(reason, *rows, compile="skip"))


def end_step() -> None:
    """A backward has ended."""
    _manual.value.end_step()


def has_manual_batches() -> bool:
    """Whether the script has divided a batch itself since the last backward."""
    return bool(_manual.value.candidates()) and not _manual.value.is_stale


def reset() -> None:
    """Forget every batch, and how far the training has come in them."""
    _manual.value = ManualBatchTracker()
    progress.current.reset()
    loop_ends.reset()
    noted_losses.reset()
    _trackers.clear()
    _parts.clear()
    _gone.clear()
    _block_of.clear()
    _past.clear()
    _recent.clear()
    _warned.clear()


def _request(tracker: BatchTracker, block: Block | None) -> int:
    if block is not None:
        progress.current.note_request()
        if tracker is not _manual.value:
            progress.current.note_loaded()
        if progress.is_followed() and not block.has_empty_ranks and len(_past) < _MAX_PAST:
            _past[block] = None
        if progress.is_followed() and torch.is_grad_enabled():
            _recent.append(block)
    if tracker is not _manual.value:
        progress.current.note_loader_request(is_end=block is None)
    _trackers[:] = [t for t in _trackers if t is not tracker and not t.is_stale] + [tracker]
    _forget_gone(tracker)
    return tracker.request(block)


def _forget_gone(tracker: BatchTracker) -> None:
    """Forget the parts whose storages are gone and, of this tracker, those whose tensors are.

    Only what is gone is looked at: a script may keep every batch, and one storage may hold the
    whole data set.
    """
    for _ in range(len(_gone)):
        address, number = key = _gone.popleft()
        storage, parts = _parts[address]
        if storage.expired() or parts[number].tracker is tracker:
            del parts[number]
        else:
            _gone.append(key)
        if not parts:
            del _parts[address]


def is_registered(tensor: Tensor) -> bool:
    """Whether this very tensor is a part of a batch that is sharded already."""
    return tensor in _block_of


def may_be_skipped(block: Block) -> bool:
    """Whether ranks without rows of this batch, at some number of ranks, do not get it now."""
    if torch.is_grad_enabled():
        return False
    return block.has_empty_ranks or any(tracker.is_short(block) for tracker in _trackers)


def find_block(tensor: Tensor) -> Block | None:
    """The block in whose memory this tensor lies."""
    tensor = _without_transforms(tensor)
    part = _part_of(tensor)
    block: Block | None = _block_of.get(tensor) if part is None else part.block
    return block


def may_be_share(values: object) -> bool:
    """Whether these tensors lie in this rank's share of a batch, or have as many rows as the share
    on which a loop works now. Notes nothing."""
    tensors = tensor_leaves(values)
    blocks = [find_block(tensor) for tensor in tensors]
    if scope_number() is None:
        in_use = [each for each in _trackers if not each.is_stale]
        in_use = [each for each in in_use if each.has_mode_of_now] or in_use
        lengths = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        blocks += [b for each in in_use for b in each.candidates() if b.count in lengths]
    return any(block is not None and block.size > 1 for block in blocks)


def find_candidates(values: object, *, may_be_kept: bool = False) -> BatchCandidates:
    """The batches to which these inputs may belong: one, if they lie in its memory.

    `may_be_kept`: whether they may be a copy of an earlier batch, which all ranks will find out.
    """
    tensors = [_without_transforms(tensor) for tensor in tensor_leaves(values)]
    for tensor in tensors:
        part = _part_of(tensor)
        if part is not None:
            part.tracker.observe(part.index)
        block = find_block(tensor)
        if block is not None:
            return BatchCandidates((block,))
    found = _candidates(_lengths(tensors, 0))
    own = found.blocks[0]
    if not may_be_kept or len(found.blocks) > 1 or own is None or not found.rows:
        return found
    earlier = tuple(b for b in dict.fromkeys(_recent) if b.fractions() != own.fractions())
    return replace(found, earlier=earlier, inner=tuple(_lengths(tensors, k) for k in (1, 2, 3)))


def _lengths(tensors: Iterable[Tensor], dim: int) -> frozenset[int]:
    return frozenset(tensor.shape[dim] for tensor in tensors if tensor.dim() > dim)


def _candidates(rows: frozenset[int]) -> BatchCandidates:
    """The batches that the order of requests leaves.

    Where a loop without gradients runs inside of one with gradients, or such a loop was left, the
    batches that were requested with gradients as they are now go before the others.
    """
    in_use = [tracker for tracker in _trackers if tracker.candidates()]
    in_use = [tracker for tracker in in_use if tracker.has_mode_of_now] or in_use
    if len(in_use) == 1:
        in_use[0].assume_forward()
    blocks: list[Block | None] = [b for tracker in in_use for b in tracker.candidates()]
    if not in_use:  # the script may have kept any batch, or have made this one otherwise
        blocks = [*(_past if rows else ()), *(each.last for each in _trackers[-1:]), None]
    same_on_all_ranks = not any(tracker.in_other_thread for tracker in in_use)
    return BatchCandidates(tuple(dict.fromkeys(blocks)), rows, same_on_all_ranks)


def _without_transforms(tensor: Tensor) -> Tensor:
    """What transforms of torch.func have wrapped: under vmap all samples' rows."""
    while is_transformed(tensor):
        tensor = unwrap_transformed(tensor)
    return tensor


def _part_of(tensor: Tensor) -> _Part | None:
    covered = _bytes_of(tensor) if _parts else None
    if covered is None:
        return None
    _, parts = _parts.get(tensor.untyped_storage()._cdata, (None, {}))
    first, end = covered
    latest = reversed(parts.values())
    return next((part for part in latest if part.first <= first and end <= part.end), None)


def _bytes_of(tensor: Tensor) -> tuple[int, int] | None:
    """The first byte that a tensor covers in its storage, and the one behind its last.

    None where it covers none, or has no storage (a sparse tensor).
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first, width = int(tensor.storage_offset()), tensor.element_size()
    return first * width, (first + reach + 1) * width
