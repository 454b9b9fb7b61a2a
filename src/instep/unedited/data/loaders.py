"""The replacement of DataLoader.__iter__: each rank loads its own rows of every batch, and every
rank's loop gets the whole batch.

Only loading is shared: the script's sampler, collate_fn and loop see what one process sees.
"""

from __future__ import annotations

import copy
import weakref
from functools import partial
from itertools import count
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe, Subset

from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.communication.transport import get_transport
from instep.process import in_main_thread, settings
from instep.process.patching import Function
from instep.training.random_streams import is_deterministic
from instep.training.shards import ShardedLoader
from instep.unedited.data.exchange_policy import ExchangePolicy
from instep.unedited.data.generators import find_generator, find_variables, may_set_generator
from instep.unedited.data.known_datasets import all_known, known_dataset, warn_of
from instep.unedited.data.row_loading import RowBatchSampler, RowDataset, init_worker, no_collate
from instep.unedited.data.whole_batches import WholeBatchIterator, pin
from instep.unedited.data.workers.worker_batches import WorkerBatchIterator, WorkerLoading
from instep.unedited.data.workers.worker_datasets import WorkerDataset, WorkerDivision, WorkerStream

_iterators: weakref.WeakSet[WholeBatchIterator | WorkerBatchIterator] = weakref.WeakSet()
"""Those of the script that may still be in use."""
_channels = count(1)


def iterate(original: Function, loader: DataLoader[Any]) -> Any:
    """Iterate over batches that are the same on every rank.

    If the samples of a batch can be loaded one by one, each rank loads its own rows and the ranks
    exchange them; if that takes longer than loading all of them, or there is one rank, each loads
    all. In both cases each sample draws from a random stream of its own, unless samples are small:
    see `sample_loading`. Of any other data set each rank loads the batches as plain Python loads
    them: see `_can_load_rows`. Where there are workers and the ranks wait for them, each worker
    loads on one rank for all.

    Args:
        original: torch's own method.
        loader: the script's.
    """
    loader.in_order = True  # otherwise the order depends on which worker happens to finish first
    if not _can_load_rows(loader):
        return _batches_of_workers(original, loader)
    transport = get_transport()
    workers = loader.num_workers
    policy = known_dataset(loader).policies.setdefault(
        (workers, loader.batch_size),
        ExchangePolicy(transport.size, workers, not workers and str(settings.LOAD) == "auto"),
    )
    row_dataset = _row_dataset(loader)
    row_loader = copy.copy(loader)
    vars(row_loader).update(
        dataset=row_dataset,
        batch_sampler=RowBatchSampler(loader.batch_sampler or (), loader.generator, policy),
        collate_fn=no_collate,
    )
    if loader.num_workers:
        row_loader.worker_init_fn = partial(init_worker, loader.worker_init_fn)
    batches = original(row_loader)
    if loader.persistent_workers:
        loader._iterator = batches
    sampler = batches._index_sampler
    sampler.channel = sampler.channel or next(_channels)
    iterator = WholeBatchIterator(batches, loader, row_dataset, policy)
    _iterators.add(iterator)
    return iterator


def _row_dataset(loader: DataLoader[Any]) -> RowDataset:
    known = known_dataset(loader)
    if known.effects.generators:  # in another pass, as an evaluation, it may draw nothing
        known.effects.generators = None
    return RowDataset(loader.dataset, loader.collate_fn, known.variables, known.effects)


def is_loading_shared() -> bool:
    """Whether the ranks share the loading of data, since that is faster, or since a batch is under
    way of which each has loaded some rows."""
    known = [policy for each in all_known() for policy in each.policies.values()]
    return any(policy.has_gained for policy in known) or any(
        iterator.needs_all_ranks() for iterator in _iterators
    )


def stop_sharing() -> None:
    """From now on this rank loads everything, also in passes that are under way."""
    for known in all_known():
        known.worker_loading = WorkerLoading()
        for policy in known.policies.values():
            policy.set_single_rank()


def _can_load_rows(loader: DataLoader[Any]) -> bool:
    """Whether any rank can load any sample of a batch, and something is gained by it.

    Not for datasets of tensors, where nothing is gained; for datasets that make the batch
    themselves (iterable datasets, batch_size=None, `__getitems__`); for samples that depend on
    those loaded before (a random generator of the dataset's own); in a thread or worker of the
    script's, unless it goes on with workers that persist; or if INSTEP_LOAD=whole forbids it.
    """
    if not _may_share(loader):
        return False
    iterator: Any = loader._iterator
    if iterator is not None:
        return isinstance(iterator._index_sampler, RowBatchSampler)
    if not in_main_thread():
        return False
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset | MapDataPipe):
        return False
    if _loads_batches(loader.dataset) or is_deterministic(loader.dataset):
        return False
    return not _look_for_generator(loader)


def _may_share(loader: DataLoader[Any]) -> bool:
    is_whole = str(settings.LOAD) == "whole"
    return not (is_whole or is_rank_local() or isinstance(loader, ShardedLoader))


def _batches_of_workers(original: Function, loader: DataLoader[Any]) -> Any:
    """An iterator over batches that workers load as plain Python's do, the same on all ranks;
    torch's own without workers, or in a thread of the script's."""
    transport = get_transport()
    persistent = getattr(loader._iterator, "_dataset", None)
    division = persistent.division if isinstance(persistent, WorkerDataset) else None
    if division is None:
        is_in_turn = bool(loader.num_workers) and in_main_thread() and transport.size > 1
        if not (is_in_turn and _may_share(loader)):
            return original(loader)
    loading = known_dataset(loader).worker_loading
    loading.begin_pass()
    if not isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        division = division or WorkerDivision(transport.rank, transport.size)
        division.set(is_on=loading.is_divided)
    batches = original(loader if division is None else _worker_loader(loader, division))
    if loader.persistent_workers:
        loader._iterator = batches
    iterator = WorkerBatchIterator(
        batches,
        loading,
        division,
        loader.num_workers,
        next(_channels),
        pin=partial(pin, loader),
        warn=partial(warn_of, loader),
    )
    _iterators.add(iterator)
    return iterator


def _worker_loader(loader: DataLoader[Any], division: WorkerDivision) -> DataLoader[Any]:
    """A loader whose workers answer with WorkerBatch."""
    kind = WorkerStream if isinstance(loader.dataset, IterableDataset) else WorkerDataset
    dataset = kind(loader.dataset, loader.collate_fn, division)
    copied = copy.copy(loader)
    vars(copied).update(
        dataset=dataset,
        collate_fn=dataset.collate,
        worker_init_fn=partial(init_worker, loader.worker_init_fn),
    )
    return copied


def _loads_batches(dataset: object) -> bool:
    """Whether a data set loads all samples of a batch at once."""
    if type(dataset) is Subset:
        return _loads_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _look_for_generator(loader: DataLoader[Any]) -> bool:
    """Begin a pass; returns whether the data set holds a random generator, and warns if it does.

    In the passes 1, 2, 4, 8 and so on it is looked for. Collective: where there is much to be
    looked at, ranks may find it in different places, or not at all.
    """
    known = known_dataset(loader)
    known.passes += 1
    if known.passes.bit_count() == 1:
        found = get_transport().all_gather_object(find_generator(loader.dataset))
        known.generator = next(filter(None, found), None)
        known.variables = find_variables(loader.dataset)
    if loader.num_workers and may_set_generator(loader.worker_init_fn):
        known.generator = known.generator or "which worker_init_fn may make"
    if known.generator:
        where = f"a generator of its own ({known.generator})"
        warn_of(loader, f"each rank loads all of it: it draws from {where}.")
    return bool(known.generator)
