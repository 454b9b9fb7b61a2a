"""The batches that workers load as in one process: on each rank, or, where that takes time or the
ranks' workers load different ones, those of each worker on one rank for all.

In a worker, a seed from the clock or from the process id is another one on each rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.scopes import can_pickle, format_exception
from instep.distributed.communication.thread_channel import ThreadChannel
from instep.distributed.communication.transport import get_transport
from instep.process import in_main_thread
from instep.process.failures.tracebacks import drop_own_frames
from instep.unedited.data.batch_exchange import ExchangeTransport
from instep.unedited.data.exchange_policy import is_sending_faster
from instep.unedited.data.packed_samples import CannotPackError, PackedSamples, pack, unpack
from instep.unedited.data.workers import worker_failures
from instep.unedited.data.workers.worker_datasets import WorkerBatch, WorkerDivision
from instep.unedited.errors import LoadingError

_FIRST_MEASURED = 8
"""The batch in which the ranks first look at how long they wait; before it workers start."""


@dataclass(frozen=True)
class _Header:
    """What a worker's rank sends of its next batch before the memory of it."""

    pickled: bytes = b""
    nbytes: int = 0
    error: bytes = b""
    """In place of a batch: what the worker raised."""
    is_over: bool = False
    """There is no other batch of this worker."""
    effect: str = ""


@dataclass(frozen=True)
class _LoadedBatch:
    """What a rank says of a batch that each has loaded."""

    worker: int | None
    checksum: object
    nbytes: int
    waited: float
    """Seconds for which the rank waited for each batch since the ranks last compared, and in which
    a worker would have loaded if it had had a core."""
    effect: str


@dataclass
class WorkerLoading:
    """How a data set is loaded in all passes that follow."""

    is_divided: bool = False
    """Whether each worker loads on one rank for all ranks."""
    differs: bool = False
    """Whether it has to: the ranks' workers have loaded different batches."""
    effect: str = ""
    """What loading changes beside the batches, on the rank that loads only."""

    def begin_pass(self) -> None:
        """Go on as far as that has turned out to be right."""
        self.is_divided = self.differs or (self.is_divided and not self.effect)


class WorkerBatchIterator:
    """The batches of a loader with workers, the same on all ranks.

    The ranks compare what they have loaded, and how long they waited for it, in the 1st, 2nd, 4th,
    8th ... batch. Other attributes are those of torch's own iterator.

    Args:
        batches: torch's iterator, over WorkerBatch if there is a `division`; otherwise rank 0 is
            the one that loads for all.
        warn: prints a line about the data set.
    """

    def __init__(
        self,
        batches: Any,
        loading: WorkerLoading,
        division: WorkerDivision | None,
        workers: int,
        channel: int,
        pin: Callable[[Any], Any],
        warn: Callable[[str], None],
    ) -> None:
        self._batches, self._loading, self._division = batches, loading, division
        self._channel, self._pin, self._warn = channel, pin, warn
        self._worker_count = workers if division else 1
        self._active = [*range(self._worker_count)]
        """The workers that have batches left, as far as is known."""
        self._next_worker = 0
        self._ahead: WorkerBatch | Exception | None = None
        """Loaded on this rank before it is its worker's turn."""
        self._count, self._waited = 0, 0.0
        self._is_divided, self._is_over = loading.is_divided, False

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_batches"), name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> WorkerBatchIterator:
        return self

    def needs_all_ranks(self) -> bool:
        """Whether this rank gets some of the next batches from others."""
        return self._is_divided and not self._is_over

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        return raise_or_return(self._next_batch())

    def _next_batch(self) -> Any:
        """The next batch, or what was raised in place of it."""
        transport = get_transport()
        channel = transport if in_main_thread() else ThreadChannel(self._channel)
        self._count += 1
        if not self._is_divided:
            own = self._load()
            is_compared = self._count.bit_count() == 1 and transport.size > 1
            if not (is_compared and self._agree_to_divide(own, channel)):
                return own.batch if isinstance(own, WorkerBatch) else own
            self._ahead = own
        batch = self._next_of_workers(channel)
        self._is_over = isinstance(batch, StopIteration)
        if self._is_over:
            self._batches = iter(())  # workers of other ranks' batches have no end of their own
        return batch

    def _load(self) -> WorkerBatch | Exception:
        """This rank's next batch, or what was raised in place of it."""
        start = perf_counter()
        try:
            with worker_failures.raising_here(self._batches):
                loaded = next(self._batches)
        except Exception as error:
            if not self._is_divided and not isinstance(error, StopIteration):
                worker_failures.check_is_known(error, self._batches)
            drop_own_frames(error)
            return error
        loaded = loaded if isinstance(loaded, WorkerBatch) else WorkerBatch(0, loaded)
        self._waited += (perf_counter() - start) * loaded.without_core
        return loaded

    def _agree_to_divide(self, own: WorkerBatch | Exception, channel: ExchangeTransport) -> bool:
        """Let each worker load on one rank from now on, if the ranks have loaded different batches,
        or wait for them longer than they would for those of each other, since they have more
        workers than cores. Returns whether that is so. Collective."""
        batches_waited = max(1, self._count // 2)
        seen = channel.all_gather_object(_describe(own, self._waited / batches_waited))
        self._waited = 0.0
        checksums = [each.checksum for each in seen]
        differs = None not in checksums and len({*checksums}) > 1
        effect = next((each.effect for each in seen if each.effect), "")
        self._loading.effect = self._loading.effect or effect
        if not (differs or self._would_gain(seen)):
            return False
        self._divide(seen, differs=differs)
        return True

    def _would_gain(self, seen: list[_LoadedBatch]) -> bool:
        """Whether the ranks wait longer for batches than sending them would take, and may send
        them."""
        return (
            self._count >= _FIRST_MEASURED
            and seen[0].worker is not None
            and all(each.checksum is not None for each in seen)
            and not self._loading.effect
            and is_sending_faster(max(each.waited for each in seen), seen[0].nbytes)
        )

    def _divide(self, seen: list[_LoadedBatch], *, differs: bool) -> None:
        """Begin with the worker whose batch the ranks have loaded. `differs`: they have loaded
        different ones."""
        self._is_divided = self._loading.is_divided = True
        self._loading.differs |= differs
        if self._division is not None:
            self._division.set(is_on=True)
        if differs:
            self._warn(
                "in its workers, each rank has other samples (a seed from the clock or the process "
                "id?). What a worker loads is that of one rank on all ranks."
            )
        found = (each.worker for each in seen if each.worker is not None)
        self._next_worker = next(found, 0)

    def _next_of_workers(self, channel: ExchangeTransport) -> Any:
        """The next batch, of which one rank sends the others a copy, or what was raised in place of
        it. Collective."""
        # torch would count what workers answer without loading.
        self._batches._IterableDataset_len_called = None
        while self._active:
            worker = next((w for w in self._active if w >= self._next_worker), self._active[0])
            self._next_worker = worker + 1
            owner = self._division.owner(worker) if self._division is not None else 0
            own = None
            if channel.rank == owner or self._division is not None:
                own = self._pull(worker)
            header, batch = _broadcast(own, owner, channel)
            if header.effect and owner > 0 and not self._loading.effect:
                self._loading.effect = header.effect
                self._warn(
                    f"a worker on rank {owner} {header.effect}, which only counts on rank 0. With "
                    "--load whole every rank loads everything."
                )
            if header.is_over:
                self._active.remove(worker)
                continue
            return batch if channel.rank == owner else self._pin(batch)
        return StopIteration()

    def _pull(self, worker: int) -> WorkerBatch | Exception | None:
        """What this rank has next of a worker; None if that has no batch left here: of those that
        have, torch takes one batch in turn."""
        for _ in range(self._worker_count + 1):
            loaded = self._ahead if self._ahead is not None else self._load()
            self._ahead = None
            if isinstance(loaded, WorkerBatch) and loaded.worker != worker:
                if loaded.worker in self._active:
                    self._ahead = loaded
                    return None
            elif isinstance(loaded, StopIteration):
                self._ahead = loaded
                return None
            else:
                return loaded
        return None


def _describe(own: WorkerBatch | Exception, waited: float) -> _LoadedBatch:
    if isinstance(own, Exception):
        return _LoadedBatch(None, type(own).__name__, 0, waited, "")
    try:
        packed = pack(own.batch)
    except CannotPackError:
        return _LoadedBatch(own.worker, None, 0, waited, own.effect)
    return _LoadedBatch(own.worker, packed.checksum(), packed.memory.nbytes, waited, own.effect)


def _broadcast(
    own: WorkerBatch | Exception | None, owner: int, channel: ExchangeTransport
) -> tuple[_Header, Any]:
    """What the owner says of its next batch, and that batch or its error. Collective."""
    is_own = channel.rank == owner
    header, memory = _pack(own, owner) if is_own else (_Header(), None)
    header = channel.broadcast_object(header, owner)
    if header.error:
        return header, own if isinstance(own, Exception) else pickle.loads(header.error)
    if header.is_over:
        return header, None
    if memory is None:
        memory = torch.empty(header.nbytes, dtype=torch.uint8, device="cpu")
    if header.nbytes:
        channel.broadcast(memory, owner).wait()
    if is_own:
        assert isinstance(own, WorkerBatch)
        return header, own.batch
    return header, unpack(PackedSamples(header.pickled, memory))


def _pack(own: WorkerBatch | Exception | None, owner: int) -> tuple[_Header, Tensor | None]:
    if own is None:
        return _Header(is_over=True), None
    if isinstance(own, WorkerBatch):
        try:
            packed = pack(own.batch)
        except CannotPackError as error:
            return _pack(error, owner)
        header = _Header(packed.pickled, packed.memory.nbytes, effect=own.effect)
        return header, packed.memory
    if not can_pickle(own):
        own = LoadingError(owner, type(own).__name__, format_exception(own))
    return _Header(error=pickle.dumps(own)), None


def raise_or_return(batch: Any) -> Any:
    """Return it, or raise the exception that is in place of it."""
    if not isinstance(batch, BaseException):
        return batch
    original = batch  # so called, tracebacks are those of plain Python
    try:
        raise original
    finally:
        del batch, original  # its traceback holds this frame, and so the workers
