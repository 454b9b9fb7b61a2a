"""The batches of data that every rank loads whole, in workers: rank 0's, if they differ.

In a worker, a seed from the clock or from the process id is another one on each rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instep.distributed.communication.scopes import can_pickle, format_exception
from instep.distributed.communication.transport import Transport, get_transport
from instep.unedited.data.packed_samples import CannotPackError, PackedSamples, pack, unpack
from instep.unedited.data.row_loading import in_main_thread
from instep.unedited.errors import LoadingError


@dataclass(frozen=True)
class Rank0Header:
    """What rank 0 sends of its next batch before the memory of it."""

    pickled: bytes = b""
    nbytes: int = 0
    error: bytes = b""
    """In place of a batch: what rank 0 raised, StopIteration at the end."""


@dataclass
class Rank0Loading:
    """Whether rank 0 loads a data set for all ranks, in all passes that follow."""

    is_on: bool = False


class Rank0BatchIterator:
    """The batches that this rank loads, compared with those of the others in the 1st, 2nd, 4th,
    8th ... batch; those of rank 0 if the ranks have loaded different ones.

    Other attributes are those of torch's own iterator.
    """

    def __init__(
        self,
        batches: Any,
        loading: Rank0Loading,
        pin: Callable[[Any], Any],
        report: Callable[[], None],
    ) -> None:
        self._batches, self._loading = batches, loading
        self._pin, self._report = pin, report
        self._count = 0
        self._is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_batches"), name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Rank0BatchIterator:
        return self

    def needs_all_ranks(self) -> bool:
        """Whether the other ranks get the next batches from rank 0."""
        return self._loading.is_on and not self._is_over

    def __next__(self) -> Any:
        transport = get_transport()
        if transport.size == 1 or not in_main_thread():
            return next(self._batches)
        self._count += 1
        if self._loading.is_on:
            own = self._load() if transport.rank == 0 else None
            return self._from_rank0(own, transport)
        own = self._load()
        if self._count.bit_count() == 1 and self._differs(own, transport):
            self._loading.is_on = True
            self._report()
            return self._from_rank0(own, transport)
        return _raise_or_return(own)

    def _load(self) -> Any:
        """The next batch, or what was raised in place of it."""
        try:
            return next(self._batches)
        except Exception as error:
            return error

    def _differs(self, own: Any, transport: Transport) -> bool:
        """Whether the ranks have loaded different batches, as far as those can be sent."""
        seen = transport.all_gather_object(_checksum(own))
        return None not in seen and len({*seen}) > 1

    def _from_rank0(self, own: Any, transport: Transport) -> Any:
        header, memory = _pack(own) if transport.rank == 0 else (Rank0Header(), None)
        header = transport.broadcast_object(header, 0)
        if header.error:
            batch = own if isinstance(own, Exception) else pickle.loads(header.error)
        else:
            if memory is None:
                memory = torch.empty(header.nbytes, dtype=torch.uint8, device="cpu")
            if header.nbytes:
                transport.broadcast(memory, 0).wait()
            packed = PackedSamples(header.pickled, memory)
            batch = own if transport.rank == 0 else self._pin(unpack(packed))
        self._is_over = isinstance(batch, StopIteration)
        return _raise_or_return(batch)


def _checksum(batch: Any) -> object:
    """Equal for equal batches; None if this cannot be known."""
    if isinstance(batch, Exception):
        return type(batch).__name__
    try:
        return pack(batch).checksum()
    except CannotPackError:
        return None


def _pack(batch: Any) -> tuple[Rank0Header, Tensor | None]:
    error = batch
    if not isinstance(batch, Exception):
        try:
            packed = pack(batch)
            return Rank0Header(packed.pickled, packed.memory.nbytes), packed.memory
        except CannotPackError as cannot:
            error = cannot
    if not can_pickle(error):
        error = LoadingError(0, type(error).__name__, format_exception(error))
    return Rank0Header(error=pickle.dumps(error)), None


def _raise_or_return(batch: Any) -> Any:
    if not isinstance(batch, Exception):
        return batch
    try:
        raise batch
    finally:
        del batch  # its traceback holds this frame, and so the workers
