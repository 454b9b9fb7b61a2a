"""The indices of this rank's block of every batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from instep.distributed.communication.transport import get_transport
from instep.training.blocks import Block
from instep.training.errors import OtherDataError
from instep.training.random_streams import SeededIndex, SharedRandomStream, derive_seed

_RANDOM = RandomSampler, SubsetRandomSampler, WeightedRandomSampler


def empty_block() -> Block:
    """This rank's block of a batch without samples. In a scope of one rank all rows are its own."""
    transport = get_transport()
    return Block(transport.rank, transport.size, 0)


class BlockBatchSampler:
    """The indices of this rank's block of every batch of another batch sampler.

    The order of each epoch is drawn from a shared stream of its own. `seeded`: request a
    `SeededIndex` instead of an index.
    """

    def __init__(
        self,
        batches: Iterable[list[Any]],
        seed: int,
        *,
        seeded: bool,
        empty_block: Callable[[], Block],
    ) -> None:
        self.last: EpochBatches | None = None
        self._batches = batches
        self.seed = seed
        self._seeded = seeded
        self.empty_block = empty_block
        self.epoch = -1  # set by the loader: torch may iterate twice for one epoch
        self.skipped = 0
        """How many samples of the epoch were taken before a checkpoint."""

    def __len__(self) -> int:
        assert isinstance(self._batches, Sized)
        return len(self._batches)

    def __iter__(self) -> EpochBatches:
        seed = derive_seed(self.seed, self.epoch)
        batches = _drawing_from(self._batches, torch.Generator().manual_seed(seed))
        activate = nullcontext if batches is not None else SharedRandomStream(seed).activate
        epoch = self.epoch if self._seeded else None
        self.last = EpochBatches(
            self._batches if batches is None else batches,
            activate,
            self.empty_block(),
            epoch,
            self.skipped,
        )
        return self.last


def _drawing_from(sampler: Any, generator: torch.Generator) -> Any:
    """A copy of one of torch's samplers that draws from `generator` what it would draw from the
    global one in that state; None for other samplers."""
    kind = type(sampler)
    if kind is BatchSampler:
        inner = _drawing_from(sampler.sampler, generator)
        return None if inner is None else _with(sampler, sampler=inner)
    if kind is SequentialSampler or (kind in _RANDOM and sampler.generator is not None):
        return sampler
    if kind is RandomSampler:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
        return _with(sampler, generator=torch.Generator().manual_seed(seed))
    return _with(sampler, generator=generator) if kind in _RANDOM else None


def _with(sampler: Any, /, **attributes: Any) -> Any:
    changed = copy.copy(sampler)
    vars(changed).update(attributes)
    return changed


class EpochBatches:
    """One epoch's lists of indices; `planned` holds their blocks until the batches are loaded."""

    def __init__(
        self,
        batches: Iterable[list[Any]],
        activate: Callable[[], AbstractContextManager[object]],
        empty_block: Block,
        epoch: int | None,
        skipped: int,
    ) -> None:
        self.planned: deque[Block] = deque()
        self._skipped = skipped
        self._count = 0
        """How many batches of the epoch were requested, those before a checkpoint included."""
        self._activate = activate
        self._empty_block = empty_block
        self._epoch = epoch
        with activate():
            self._batches = iter(batches)

    def __iter__(self) -> EpochBatches:
        return self

    def __next__(self) -> list[Any]:
        if self._skipped:
            self._skip()
        with self._activate():
            batch = list(next(self._batches))
        self._count += 1
        block = replace(self._empty_block, total=len(batch))
        self.planned.append(block)
        local = block.slice(batch)
        if self._epoch is None:
            return local
        return [SeededIndex(index, self._epoch, self._count) for index in local]

    def _skip(self) -> None:
        """Pass over the batches that were taken before a checkpoint."""
        seen, skipped, self._skipped = 0, self._skipped, 0
        with self._activate():
            while seen < skipped:
                batch = next(self._batches, None)
                seen += 0 if batch is None else len(batch)
                if batch is None or seen > skipped:
                    raise OtherDataError.of_batches(skipped, seen)
                self._count += 1
