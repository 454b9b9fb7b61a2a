"""The replacement of DataLoader.__iter__: each rank loads its own rows of every batch, and every
rank's loop gets the whole batch.

Only loading is shared: the script's sampler, collate_fn and loop see what one process sees.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe, Subset
from torch.utils.weak import WeakIdKeyDictionary

from instep.distributed.communication.rank_local import is_rank_local
from instep.distributed.communication.thread_channel import ThreadChannel
from instep.distributed.communication.transport import get_transport
from instep.distributed.flight_record.recorder import phase
from instep.distributed.watchdog.signals.rank_signals import is_from_signal
from instep.process import in_main_thread, print_line, settings
from instep.process.patching import Function
from instep.process.torch_private import pin_memory
from instep.training.random_streams import is_deterministic
from instep.training.shards import ShardedLoader
from instep.unedited.data import worker_failures
from instep.unedited.data.batch_exchange import (
    ExchangedBatch,
    ExchangeTransport,
    exchange_rows,
    finish_exchange,
)
from instep.unedited.data.dataset_state import Variable
from instep.unedited.data.exchange_policy import ExchangePolicy
from instep.unedited.data.generators import find_generator, find_variables, may_set_generator
from instep.unedited.data.row_loading import (
    LoadedRows,
    LoadedSamples,
    LoadPlan,
    RowBatchSampler,
    RowDataset,
    SampleEffects,
    init_worker,
    no_collate,
)
from instep.unedited.data.worker_batches import WorkerBatchIterator, WorkerLoading, raise_or_return
from instep.unedited.data.worker_datasets import WorkerDataset, WorkerDivision, WorkerStream


@dataclass
class _KnownDataset:
    """What is known of a data set, whichever loaders read it: many scripts make a new loader for
    each pass."""

    policies: dict[tuple[int, int | None], ExchangePolicy] = field(default_factory=dict)
    """By the number of workers and the size of batches."""
    passes: int = 0
    generator: str | None = None
    """Where it holds a random generator."""
    variables: list[Variable] = field(default_factory=list)
    """The global variables that its functions name."""
    effects: SampleEffects = field(default_factory=SampleEffects)
    has_warned: bool = False
    worker_loading: WorkerLoading = field(default_factory=WorkerLoading)


_known_datasets = WeakIdKeyDictionary()
_iterators: weakref.WeakSet[WholeBatchIterator | WorkerBatchIterator] = weakref.WeakSet()
"""Those of the script that may still be in use."""
_channels = count(1)
_has_mentioned_draws = False


def iterate(original: Function, loader: DataLoader[Any]) -> Any:
    """Iterate over batches that are the same on every rank.

    If the samples of a batch can be loaded one by one, each rank loads its own rows and the ranks
    exchange them; if that takes longer than loading all of them, or there is one rank, each loads
    all. In both cases each sample draws from a random stream of its own. Of any other data set each
    rank loads the batches as plain Python loads them: see `_can_load_rows`. Where there are workers
    and the ranks wait for them, each worker loads on one rank for all.

    Args:
        original: torch's own method.
        loader: the script's.
    """
    loader.in_order = True  # otherwise the order depends on which worker happens to finish first
    if not _can_load_rows(loader):
        return _batches_of_workers(original, loader)
    transport = get_transport()
    policy = _known(loader).policies.setdefault(
        (loader.num_workers, loader.batch_size), ExchangePolicy(transport.size, loader.num_workers)
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
    return WholeBatchIterator(batches, loader, row_dataset, policy)


def _row_dataset(loader: DataLoader[Any]) -> RowDataset:
    known = _known(loader)
    if known.effects.draws:  # in another pass, as an evaluation, it may draw nothing
        known.effects.draws = None
    return RowDataset(loader.dataset, loader.collate_fn, known.variables, known.effects)


def is_loading_shared() -> bool:
    """Whether the ranks share the loading of data, since that is faster, or since a batch is under
    way of which each has loaded some rows."""
    known = [policy for each in _known_datasets.values() for policy in each.policies.values()]
    return any(policy.has_gained for policy in known) or any(
        iterator.needs_all_ranks() for iterator in _iterators
    )


def stop_sharing() -> None:
    """From now on this rank loads everything, also in passes that are under way."""
    for known in _known_datasets.values():
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
    return not _has_generator(loader)


def _may_share(loader: DataLoader[Any]) -> bool:
    whole = str(settings.LOAD) == "whole" or is_rank_local()
    return not (whole or isinstance(loader, ShardedLoader))


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
    loading = _known(loader).worker_loading
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
        pin=partial(_pin, loader),
        warn=partial(_warn, loader),
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


def _pin(loader: DataLoader[Any], batch: Any) -> Any:
    if not (loader.pin_memory and torch.accelerator.is_available()):
        return batch
    device = torch.accelerator.current_accelerator()
    return pin_memory(batch, device.type if device else None)


def _loads_batches(dataset: object) -> bool:
    """Whether a data set loads all samples of a batch at once."""
    if type(dataset) is Subset:
        return _loads_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _known(loader: DataLoader[Any]) -> _KnownDataset:
    key: Any = loader.dataset
    try:
        weakref.ref(key)
    except TypeError:
        key = loader
    known: _KnownDataset = _known_datasets.setdefault(key, _KnownDataset())
    return known


def _has_generator(loader: DataLoader[Any]) -> bool:
    """Whether the data set holds one; looked for in the passes 1, 2, 4, 8 and so on. Collective:
    where there is much to be looked at, ranks may find it in different places, or not at all."""
    known = _known(loader)
    known.passes += 1
    if known.passes.bit_count() == 1:
        found = get_transport().all_gather_object(find_generator(loader.dataset))
        known.generator = next(filter(None, found), None)
        known.variables = find_variables(loader.dataset)
    if loader.num_workers and may_set_generator(loader.worker_init_fn):
        known.generator = known.generator or "which worker_init_fn may make"
    if known.generator:
        where = f"a generator of its own ({known.generator})"
        _warn(loader, f"each rank loads all of it: it draws from {where}.")
    return bool(known.generator)


def _warn(loader: DataLoader[Any], line: str) -> None:
    """Print a line on rank 0, once for each data set."""
    known = _known(loader)
    if not known.has_warned and get_transport().rank == 0:
        name = _class_name(loader.dataset)
        print_line(f"data set {name}: {line} [INS713]")
    known.has_warned = True


def _mention_draws(dataset: object) -> None:
    """Print a line on rank 0, once in a job."""
    global _has_mentioned_draws
    if not _has_mentioned_draws and get_transport().rank == 0:
        name = _class_name(dataset)
        print_line(
            f"{name} draws random numbers in its samples. They are the same for every N, but not "
            "those of plain Python (--load whole keeps those)."
        )
    _has_mentioned_draws = True


def _class_name(dataset: object) -> str:
    """That of the script's own data set, also where random_split has made a part of it."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset).__name__


class WholeBatchIterator:
    """The batches of a loader, each joined from all ranks' rows.

    Other attributes are those of torch's own iterator.
    """

    def __init__(
        self,
        batches: Any,
        loader: DataLoader[Any],
        dataset: RowDataset,
        policy: ExchangePolicy,
    ) -> None:
        self._batches = batches
        self._row_sampler: RowBatchSampler = self._batches._index_sampler
        self._dataset = dataset
        self._loader = loader
        self._policy = policy
        self._row_sampler.channel = self._row_sampler.channel or next(_channels)
        self._is_in_thread = self._is_over = False
        _iterators.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_batches"), name)

    @property
    def _transport(self) -> ExchangeTransport:
        """In another thread a channel of its own, since threads have no common order."""
        return get_transport() if in_main_thread() else ThreadChannel(self._row_sampler.channel)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> WholeBatchIterator:
        return self

    def needs_all_ranks(self) -> bool:
        """Whether other ranks have rows of the next batches, or may be asked for some by a thread
        of the script's meanwhile."""
        is_shared = self._policy.exchanges or any(p.exchanges for p in self._row_sampler.planned)
        return not self._is_over and (is_shared or self._is_in_thread)

    def __next__(self) -> Any:
        return raise_or_return(self._next_batch())

    def _next_batch(self) -> Any:
        """The next batch, or what was raised in place of it."""
        batch = self._load()
        plan = self._row_sampler.planned.popleft()
        if plan.exchanges:
            batch = self._exchange(batch, plan)
        elif isinstance(batch, BaseException):
            worker_failures.check_is_known(batch, self._batches)
        if isinstance(batch, LoadedSamples):
            batch = _pin(self._loader, self._collate(batch.samples, plan))
        return batch

    def _load(self) -> Any:
        """What this rank was asked to load for the next batch, or the error that it raised."""
        self._is_in_thread = not in_main_thread()
        try:
            with phase("data"), worker_failures.raising_here(self._batches):
                return next(self._batches)
        except StopIteration:
            self._is_over = True
            if self._policy.exchanges:
                finish_exchange(self._transport)
            raise
        except BaseException as error:
            # Without a plan it was raised by the sampler, on every rank.
            if not self._row_sampler.planned or is_from_signal(error):
                raise
            return error

    def _exchange(self, rows: LoadedRows | BaseException, plan: LoadPlan) -> Any:
        """The whole batch, pinned if the loader pins; or its samples; or an error."""
        batch = exchange_rows(rows, plan, self._transport)
        if batch.error is not None:
            return batch.error
        self._update_policy(batch, plan)
        if batch.cannot_pack:
            return self._dataset.load_again(plan)
        if self._policy.loads_rest or batch.prints:
            # With workers the script does not see what a sample changes of the data set itself.
            dataset = self._dataset
            if self._loader.num_workers:
                dataset = RowDataset(copy.copy(self._loader.dataset), self._loader.collate_fn)
            dataset.load_rest(plan, draws=batch.draws)
        if batch.samples is not None:
            return LoadedSamples(batch.samples)
        return _pin(self._loader, batch.collated)

    def _collate(self, samples: list[Any], plan: LoadPlan) -> Any:
        if self._loader.num_workers:
            return self._dataset.collate(samples, plan.whole_request())
        return self._loader.collate_fn(samples)

    def _update_policy(self, batch: ExchangedBatch, plan: LoadPlan) -> None:
        if not batch.is_consistent:
            self._policy.force(exchange=True)
            _warn(
                self._loader,
                "its samples depend on the rank that loads them, by a state or a random source of "
                "its own. Every rank gets the same batches, but not those of one process; with "
                "--load whole every rank loads everything.",
            )
        elif batch.draws:
            _mention_draws(self._loader.dataset)
        effect = batch.effect or ("prints" if batch.prints and self._policy.has_printed else "")
        self._policy.has_printed |= batch.prints
        if batch.is_consistent and effect and not self._policy.loads_rest:
            self._policy.force(exchange=False, loads_rest=True)
            _warn(self._loader, f"each rank loads all of it: loading a sample {effect}.")
        if batch.cannot_pack:
            self._policy.force(exchange=False)
            reason = f"a sample cannot be sent, {batch.cannot_pack}"
            _warn(self._loader, f"each rank loads all of it: {reason}.")
        seconds = sum(header.rows.seconds for header in batch.headers)
        nbytes = sum(header.nbytes for header in batch.headers)
        self._policy.update(plan.block.total, seconds, nbytes)
