"""Batches from loaders with a DistributedSampler, which all ranks take in step."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from instep.process import in_main_thread
from instep.process.patching import Function, Patch, PatchHandle


class _BatchCounter:
    """Counts the batches that the main thread takes."""

    def __init__(self) -> None:
        self.count = 0
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        """The iterators of such loaders that have given a batch."""

    def take(self, original: Function, iterator: Any) -> Any:
        """For `__next__` of a loader's iterator."""
        batch = original(iterator)
        sampler = getattr(iterator._index_sampler, "sampler", iterator._index_sampler)
        if isinstance(sampler, DistributedSampler) and torch.is_grad_enabled():
            if iterator in self._begun:
                self.count += in_main_thread()
            self._begun.add(iterator)
        return batch


_counter = _BatchCounter()


@functools.cache
def follow_loaders() -> PatchHandle:
    """From now on batches are counted; once, for good."""
    owner = "torch.utils.data.dataloader:_BaseDataLoaderIter"
    return PatchHandle([Patch(owner, "__next__", _counter.take)])


def count_batches() -> int:
    """How many batches the main thread has taken since, evaluations without gradients left out.

    The first batch of each iterator is left out, too: often one rank takes one to show it.
    """
    return _counter.count
