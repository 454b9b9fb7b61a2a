"""Which samples are mine: this rank's block of every batch of a loader, or of one batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar, overload

from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from instep.blocks import Block, Deliveries, deliver, known_block, tensors_of
from instep.collectives import broadcast_object, transport
from instep.errors import CannotShardError, ShardedTwiceError
from instep.randomness import SharedStream, agreed_seed, mixed

T = TypeVar("T")


@overload
def shard(what: DataLoader[T]) -> ShardedLoader[T]: ...
@overload
def shard(what: T) -> T: ...
def shard(what: Any) -> Any:
    """This rank's share: of every batch of a DataLoader, or of one batch made by hand.

    The batch is that of the whole job: rank r of N gets the samples [r*n//N, (r+1)*n//N) of each
    batch of n, in the order in which one process would see them. No sample is padded, dropped or
    counted twice. A rank without samples gets one ghost sample that leaves no trace in gradients
    or batch statistics, so that its loop runs as the others do.

    Args:
        what: a DataLoader over a map-style dataset, with any sampler or batch sampler, drop_last
            and workers; or tensors (a tensor, or tuples, lists and dicts of them) whose dimension
            0 is the batch.

    Returns:
        For a loader, a DataLoader that yields blocks; `len`, `dataset`, `batch_size`, `sampler`
        and `drop_last` stay those of the whole job, and each epoch has an order of its own, the
        same on all ranks. For tensors, views of this rank's rows.

    Raises ShardedTwiceError, CannotShardError. Collective for a loader (the ranks agree on a seed).
    """
    if isinstance(what, DataLoader):
        return _sharded_loader(what)
    return _sharded_batch(what)


# ------------------------------------------------------------------------------- one batch

_by_hand = Deliveries()


def _sharded_batch(batch: T) -> T:
    tensors = tensors_of(batch)
    lengths = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(lengths) != 1 or None in lengths:
        seen = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or type(batch).__name__
        raise CannotShardError(
            f"a batch is tensors with the same number of rows (dimension 0); got {seen}."
        )
    if any(known_block(tensor) for tensor in tensors):
        raise ShardedTwiceError
    way = transport()
    block = Block(way.rank, way.size, tensors[0].shape[0])
    mine: T = tree_map(lambda leaf: _rows(leaf, block) if isinstance(leaf, Tensor) else leaf, batch)
    deliver(mine, block, _by_hand)
    return mine


def _rows(tensor: Tensor, block: Block) -> Tensor:
    return tensor[:1] if block.empty else tensor[block.start : block.stop]


# ------------------------------------------------------------------------------- a loader


def _sharded_loader(loader: DataLoader[T]) -> ShardedLoader[T]:
    if isinstance(loader, ShardedLoader):
        raise ShardedTwiceError
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        raise CannotShardError(
            f"{type(loader.dataset).__name__} has no length, so its batches have no agreed "
            "order to cut blocks from. Give it __len__ and __getitem__."
        )
    if loader.batch_sampler is None:
        raise CannotShardError(
            "a DataLoader with batch_size=None makes no batches to divide; give it a batch_size, "
            "or shard each batch: instep.shard(batch)."
        )
    if not loader.in_order:
        raise CannotShardError(
            "a DataLoader with in_order=False gives each rank the batches in another order; "
            "leave in_order=True."
        )
    return ShardedLoader(loader)


class ShardedLoader(DataLoader[T]):
    """A DataLoader that yields this rank's block of every batch of another one."""

    def __init__(self, whole: DataLoader[T]) -> None:
        if whole.generator is not None:
            whole.generator.set_state(broadcast_object(whole.generator.get_state()))
        assert whole.batch_sampler is not None
        self._blocks = BlockSampler(whole.batch_sampler, agreed_seed())
        super().__init__(
            whole.dataset,
            batch_sampler=self._blocks,
            num_workers=whole.num_workers,
            collate_fn=whole.collate_fn,
            pin_memory=whole.pin_memory,
            timeout=whole.timeout,
            worker_init_fn=whole.worker_init_fn,
            multiprocessing_context=whole.multiprocessing_context,
            generator=whole.generator,
            prefetch_factor=whole.prefetch_factor,
            persistent_workers=whole.persistent_workers,
        )
        # DataLoader forbids setting these after a batch sampler; they only inform the script.
        vars(self).update(
            batch_size=whole.batch_size, sampler=whole.sampler, drop_last=whole.drop_last
        )

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch promises its own class
        batches = super().__iter__()
        assert self._blocks.latest is not None
        return Delivering(batches, self._blocks.latest.planned)


class BlockSampler:
    """The indices of this rank's block of every batch that another batch sampler makes.

    Every iteration is an epoch, whose order is drawn from a shared stream of its own.
    """

    def __init__(self, batches: Iterable[list[int]], seed: int) -> None:
        way = transport()
        self.rank, self.size = way.rank, way.size
        self.latest: Epoch | None = None
        self._batches = batches
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        assert isinstance(self._batches, Sized)
        return len(self._batches)

    def __iter__(self) -> Epoch:
        stream = SharedStream(mixed(self._seed, self._epoch))
        self._epoch += 1
        self.latest = Epoch(self._batches, stream, self.rank, self.size)
        return self.latest


class Epoch:
    """One pass: iterate for index lists; `planned` holds their blocks until delivered."""

    def __init__(
        self, batches: Iterable[list[int]], stream: SharedStream, rank: int, size: int
    ) -> None:
        self.planned: deque[Block] = deque()
        self._stream = stream
        self._rank, self._size = rank, size
        with stream.drawing():
            self._batches = iter(batches)

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> list[int]:
        with self._stream.drawing():
            batch = list(next(self._batches))
        block = Block(self._rank, self._size, len(batch))
        self.planned.append(block)
        return block.rows(batch)


class Delivering(Generic[T]):
    """Hands out batches and notes whose block each one is."""

    def __init__(self, batches: Iterator[T], planned: deque[Block]) -> None:
        self._batches = batches
        self._planned = planned
        self._deliveries = Deliveries()

    def __iter__(self) -> Delivering[T]:
        return self

    def __next__(self) -> T:
        try:
            batch = next(self._batches)
        except StopIteration:
            deliver(None, None, self._deliveries)
            raise
        deliver(batch, self._planned.popleft(), self._deliveries)
        return batch
