"""The batches of a loader that are joined from all ranks' rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from instep.distributed.communication.thread_channel import ThreadChannel
from instep.distributed.communication.transport import get_transport
from instep.distributed.flight_record.recorder import phase
from instep.distributed.watchdog.signals.rank_signals import is_from_signal
from instep.process import in_main_thread
from instep.process.failures.tracebacks import drop_own_frames
from instep.process.patching import Function
from instep.process.torch_private.loaders import pin_memory
from instep.unedited.data.batch_exchange import (
    ExchangedBatch,
    ExchangeTransport,
    exchange_rows,
    finish_exchange,
)
from instep.unedited.data.exchange_policy import BatchLoading, ExchangePolicy
from instep.unedited.data.known_datasets import announce_draws, warn_of
from instep.unedited.data.row_loading import (
    LoadedRows,
    LoadedSamples,
    LoadPlan,
    RowBatchSampler,
    RowDataset,
)
from instep.unedited.data.workers import worker_failures
from instep.unedited.data.workers.worker_batches import raise_or_return


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
        self._is_in_thread = self._is_over = False

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
        is_shared = self._policy.exchanges or any(
            p.loading.exchanges for p in self._row_sampler.planned
        )
        return not self._is_over and (is_shared or self._is_in_thread)

    def __next__(self) -> Any:
        return raise_or_return(self._next_batch())

    def _next_batch(self) -> Any:
        """The next batch, or what was raised in place of it."""
        batch = self._load()
        plan = self._row_sampler.planned.popleft()
        if plan.loading.exchanges:
            batch = self._exchange(batch, plan)
        else:
            if plan.loading.checks:
                batch = self._check(batch)
            if isinstance(batch, BaseException):
                worker_failures.check_is_known(batch, self._batches)
        if isinstance(batch, LoadedSamples):
            if self._policy.update_plain(batch.are_small):
                batch = self._load_as_plain(plan)
            batch = pin(self._loader, self._collate(batch.samples, plan))
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
            drop_own_frames(error)
            return error

    def _exchange(self, rows: LoadedRows | BaseException, plan: LoadPlan) -> Any:
        """The whole batch, pinned if the loader pins; or its samples; or an error."""
        batch = exchange_rows(rows, plan, self._transport)
        if batch.error is not None:
            return batch.error
        if self._policy.update_plain(batch.are_small):
            return self._load_as_plain(plan)
        self._update_policy(batch, plan)
        if batch.cannot_pack:
            return self._dataset.load_again(plan)
        if self._policy.loads_rest or batch.prints:
            # With workers the script does not see what a sample changes of the data set itself.
            dataset = self._dataset
            if self._loader.num_workers:
                dataset = RowDataset(copy.copy(self._loader.dataset), self._loader.collate_fn)
            dataset.load_rest(plan, batch.generators)
        if batch.samples is not None:
            return LoadedSamples(batch.samples)
        return pin(self._loader, batch.collated)

    def _load_as_plain(self, plan: LoadPlan) -> Any:
        """All samples of the batch, loaded again as plain Python loads them."""
        return self._dataset.load_again(replace(plan, loading=BatchLoading(as_plain=True)))

    def _check(self, batch: LoadedSamples | BaseException) -> Any:
        """The batch that every rank has loaded; rank 0's, and a warning, if they are not the same:
        from the next one on they are exchanged. Collective."""
        checksum = batch.checksum() if isinstance(batch, LoadedSamples) else None
        checksums = {*self._transport.all_gather_object(checksum)}
        if len(checksums) == 1 or None in checksums:
            return batch
        self._exchange_from_now_on()
        return self._transport.broadcast_object(batch, 0)

    def _exchange_from_now_on(self) -> None:
        self._policy.force(exchange=True)
        warn_of(
            self._loader,
            "its samples depend on the rank that loads them, by a state or a random source of "
            "its own. Every rank gets the same batches, but not those of one process; with "
            "--load whole every rank loads everything.",
        )

    def _collate(self, samples: list[Any], plan: LoadPlan) -> Any:
        original: Function = self._loader.collate_fn  # so called, tracebacks are plain Python's
        if self._loader.num_workers:
            original = partial(self._dataset.collate, request=plan.whole_request())
        return original(samples)

    def _update_policy(self, batch: ExchangedBatch, plan: LoadPlan) -> None:
        if not batch.is_consistent:
            self._exchange_from_now_on()
        elif batch.generators:
            announce_draws(self._loader.dataset)
        effect = batch.effect or ("prints" if batch.prints and self._policy.has_printed else "")
        self._policy.has_printed |= batch.prints
        if batch.is_consistent and effect and not self._policy.loads_rest:
            self._policy.force(exchange=False, loads_rest=True)
            warn_of(self._loader, f"each rank loads all of it: loading a sample {effect}.")
        if batch.cannot_pack:
            self._policy.force(exchange=False)
            reason = f"a sample cannot be sent, {batch.cannot_pack}"
            warn_of(self._loader, f"each rank loads all of it: {reason}.")
        seconds = sum(header.rows.seconds for header in batch.headers)
        nbytes = sum(header.nbytes for header in batch.headers)
        self._policy.update(plan.block.total, seconds, nbytes)


def pin(loader: DataLoader[Any], batch: Any) -> Any:
    """The batch in pinned memory, if the loader pins."""
    if not (loader.pin_memory and torch.accelerator.is_available()):
        return batch
    device = torch.accelerator.current_accelerator()
    return pin_memory(batch, device.type if device else None)
