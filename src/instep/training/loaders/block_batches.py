"""The indices of this rank's block of every batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sized
from dataclasses import replace
from typing import Any

from torch.utils.data import Sampler

from instep.distributed.communication.transport import get_transport
from instep.training.blocks import Block
from instep.training.errors import OtherDataError
from instep.training.random_streams import SeededIndex, SharedRandomStream, derive_seed


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
        empty_block: Callable[[], Block] = empty_block,
    ) -> None:
        self.last: EpochBatches | None = None
        self._batches = batches
        self.seed = seed
        self._seeded = seeded
        self._empty_block = empty_block
        self.epoch = -1  # set by the loader: torch may iterate twice for one epoch
        self.skipped = 0
        """How many samples of the epoch were taken before a checkpoint."""

    def __len__(self) -> int:
        assert isinstance(self._batches, Sized)
        return len(self._batches)

    def __iter__(self) -> EpochBatches:
        stream = SharedRandomStream(
            derive_seed(self.seed, self.epoch), only_torch=_is_of_torch(self._batches)
        )
        epoch = self.epoch if self._seeded else None
        self.last = EpochBatches(self._batches, stream, self._empty_block(), epoch, self.skipped)
        return self.last


def _is_of_torch(sampler: object) -> bool:
    """Whether this is one of torch's samplers, which draw from torch's generator only."""
    if type(sampler).__module__ != Sampler.__module__:
        return False
    inner = getattr(sampler, "sampler", None)
    return inner is None or _is_of_torch(inner)


class EpochBatches:
    """One epoch's lists of indices; `planned` holds their blocks until the batches are loaded."""

    def __init__(
        self,
        batches: Iterable[list[Any]],
        stream: SharedRandomStream,
        empty_block: Block,
        epoch: int | None,
        skipped: int,
    ) -> None:
        self.planned: deque[Block] = deque()
        self._skipped = skipped
        self._count = 0
        """How many batches of the epoch were requested, those before a checkpoint included."""
        self._stream = stream
        self._empty_block = empty_block
        self._epoch = epoch
        with stream.activate():
            self._batches = iter(batches)

    def __iter__(self) -> EpochBatches:
        return self

    def __next__(self) -> list[Any]:
        if self._skipped:
            self._skip()
        with self._stream.activate():
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
        with self._stream.activate():
            while seen < skipped:
                batch = next(self._batches, None)
                seen += 0 if batch is None else len(batch)
                if batch is None or seen > skipped:
                    raise OtherDataError.of_batches(skipped, seen)
                self._count += 1
