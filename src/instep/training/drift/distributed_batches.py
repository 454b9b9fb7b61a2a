"""Batches from loaders with a DistributedSampler, which all ranks take in step."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from instep.process import in_main_thread
from instep.process.patching import Function, Patch, PatchHandle

_begun: weakref.WeakSet[Any] = weakref.WeakSet()
"""The iterators of such loaders that have given a batch."""
_count = 0


@functools.cache
def follow_loaders() -> PatchHandle:
    """From now on batches are counted; once, for good."""
    owner = "torch.utils.data.dataloader:_BaseDataLoaderIter"
    return PatchHandle([Patch(owner, "__next__", _take)])


def count_batches() -> int:
    """How many batches the main thread has taken since, evaluations without gradients left out.

    The first batch of each iterator is left out, too: often one rank takes one to show it.
    """
    return _count


def _take(original: Function, iterator: Any) -> Any:
    global _count
    batch = original(iterator)
    sampler = getattr(iterator._index_sampler, "sampler", iterator._index_sampler)
    if isinstance(sampler, DistributedSampler) and torch.is_grad_enabled():
        if iterator in _begun:
            _count += in_main_thread()
        _begun.add(iterator)
    return batch
