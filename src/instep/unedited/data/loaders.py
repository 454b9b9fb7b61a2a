"""Loaders: each rank loads its own rows of every batch, and every rank's loop gets the whole batch.

Only loading is divided: the script's sampler, collate_fn and loop see what one process sees.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, Subset
from torch.utils.data._utils.pin_memory import pin_memory

from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.communication.thread_channel import ThreadChannel
from instep.distributed.communication.transport import get_transport
from instep.process import settings
from instep.training.blocks import Block
from instep.training.random_streams import is_deterministic
from instep.training.shards import ShardedLoader
from instep.unedited.data.batch_exchange import ExchangedBatch, ExchangeTransport, end, share
from instep.unedited.data.exchange_policy import ExchangePolicy
from instep.unedited.data.generators import find_generator
from instep.unedited.data.row_loading import (
    BatchPlan,
    LoadedRows,
    LoadedSamples,
    RowBatchSampler,
    RowDataset,
    WorkerInit,
    as_they_are,
    in_main_thread,
)

_policies: WeakKeyDictionary[DataLoader[Any], ExchangePolicy] = WeakKeyDictionary()
_lanes = count(1)
_told: WeakSet[DataLoader[Any]] = WeakSet()


def iterate(original: Callable[..., Any], loader: DataLoader[Any]) -> Any:
    """What `DataLoader.__iter__` answers: batches that are the same on every rank.

    Where loading can be divided, each rank loads its own rows and they are exchanged; where that
    takes longer than loading them, or there is one rank, each loads all. Either way, what is
    random in a sample comes from a stream of its own. Everything else is loaded as plain Python
    loads it, whole on every rank: see `_by_rows`.

    Args:
        original: torch's own.
        loader: the script's.
    """
    loader.in_order = True  # otherwise the order is that in which workers happen to finish
    if not _by_rows(loader):
        return original(loader)
    way = get_transport()
    policy = _policies.setdefault(loader, ExchangePolicy(way.size, loader.num_workers))
    loading = copy.copy(loader)
    vars(loading).update(
        dataset=RowDataset(loader.dataset, loader.collate_fn),
        batch_sampler=RowBatchSampler(
            loader.batch_sampler or (), loader.generator, Block(way.rank, way.size, 0), policy
        ),
        collate_fn=as_they_are,
    )
    if loader.num_workers:
        loading.worker_init_fn = WorkerInit(loader.worker_init_fn)
    batches = original(loading)
    if loader.persistent_workers:
        loader._iterator = batches
    return WholeBatchIterator(batches, loader, policy)


def _by_rows(loader: DataLoader[Any]) -> bool:
    """Whether the samples of a batch can be loaded one by one, by anybody.

    Not where nothing would be gained (datasets of tensors), where the dataset makes the batch
    itself (iterable datasets, batch_size=None, `__getitems__`), where a sample depends on those
    loaded before it (a random generator of the dataset's own), in a thread or worker of the
    script's, and where INSTEP_LOAD=whole forbids it.
    """
    if (
        str(settings.LOAD) == "whole"
        or is_rank_local()
        or not in_main_thread()
        or isinstance(loader, ShardedLoader)
    ):
        return False
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset | MapDataPipe):
        return False
    if _in_bulk(loader.dataset) or is_deterministic(loader.dataset):
        return False
    begun: Any = loader._iterator
    if begun is not None:
        return isinstance(begun._index_sampler, RowBatchSampler)
    return not _draws_by_itself(loader)


def _in_bulk(dataset: object) -> bool:
    """Whether a data set makes all samples of a batch at once."""
    if type(dataset) is Subset:
        return _in_bulk(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _draws_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether a sample depends on how many others its data set has loaded before it."""
    found = find_generator(loader.dataset)
    if found:
        _tell(loader, f"each rank loads all of it: it draws from a generator of its own ({found}).")
    return found is not None


def _tell(loader: DataLoader[Any], line: str) -> None:
    """Say it, once for each loader."""
    if loader not in _told and get_transport().rank == 0:
        name = type(loader.dataset).__name__
        print(f"instep: data set {name}: {line}", file=sys.stderr, flush=True)
    _told.add(loader)


class WholeBatchIterator:
    """The batches of a loader, each put together from all ranks' rows of it.

    Whatever else is asked of it is torch's own iterator's.
    """

    def __init__(self, batches: Any, loader: DataLoader[Any], policy: ExchangePolicy) -> None:
        self._batches = batches
        self._requests: RowBatchSampler = self._batches._index_sampler
        self._rows = RowDataset(loader.dataset, loader.collate_fn)
        self._loader = loader
        self._policy = policy
        self._lane = next(_lanes)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_batches"), name)

    @property
    def _way(self) -> ExchangeTransport:
        """A thread of the script's meets the other ranks whenever it comes to it."""
        return get_transport() if in_main_thread() else ThreadChannel(self._lane)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> WholeBatchIterator:
        return self

    def __next__(self) -> Any:
        loaded = self._loaded()
        plan = self._requests.planned.popleft()
        if plan.shared:
            loaded = self._shared(loaded, plan)
        if isinstance(loaded, LoadedSamples):
            loaded = self._pinned(self._collated(loaded.samples, plan))
        if isinstance(loaded, Exception):
            try:
                raise loaded
            finally:
                del loaded  # its traceback holds this frame, and so the workers
        return loaded

    def _loaded(self) -> Any:
        """What this rank was asked to load for the next batch, or the error that came of it."""
        try:
            return next(self._batches)
        except StopIteration:
            if self._policy.exchanging:
                end(self._way)
            raise
        except Exception as error:
            if not self._requests.planned:  # the sampler's own, on every rank
                raise
            return error

    def _shared(self, loaded: LoadedRows | Exception, plan: BatchPlan) -> Any:
        """The whole batch, pinned if that is asked for; or its samples; or an error."""
        shared = share(loaded, plan, self._way)
        if shared.error is not None:
            return shared.error
        self._learn(shared, plan)
        if shared.refusal:
            return self._rows.__getitems__(plan.whole())
        if shared.samples is not None:
            return LoadedSamples(shared.samples)
        return self._pinned(shared.collated)

    def _collated(self, samples: list[Any], plan: BatchPlan) -> Any:
        if self._loader.num_workers:
            return self._rows.collated(samples, plan.whole())
        return self._loader.collate_fn(samples)

    def _pinned(self, batch: Any) -> Any:
        if not (self._loader.pin_memory and torch.accelerator.is_available()):
            return batch
        device = torch.accelerator.current_accelerator()
        return pin_memory(batch, device.type if device else None)

    def _learn(self, shared: ExchangedBatch, plan: BatchPlan) -> None:
        if not shared.proved:
            self._policy.force(exchanging=True)
            _tell(
                self._loader,
                "its samples depend on who loads them, by a state or a random source of its own. "
                "Every rank gets the same batches, but not those of one process; with "
                "--load whole every rank loads everything.",
            )
        if shared.refusal:
            self._policy.force(exchanging=False)
            line = f"each rank loads all of it: a sample cannot travel, {shared.refusal}."
            _tell(self._loader, line)
        seconds = sum(header.seconds for header in shared.headers)
        nbytes = sum(header.nbytes for header in shared.headers)
        self._policy.learn(plan.place.total, seconds, nbytes)
