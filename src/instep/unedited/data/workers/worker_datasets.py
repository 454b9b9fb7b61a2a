"""A data set as the workers of a loader read it that the ranks may divide: once they do, a worker
loads its batches on one rank only.

On the other ranks a worker of the same number answers without loading, so that torch's loader has
its order of workers, seeds and ends as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from instep.process.failures.tracebacks import OwnFrames
from instep.process.torch_private.loaders import pin_memory
from instep.unedited.data.loading_effects import LoadingEffects

_ABSENT, _END = object(), object()


class WorkerDivision:
    """Which rank loads the batches of which worker, in the processes of a rank and its workers."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self._ranks = ranks
        self._is_on = torch.zeros((), dtype=torch.bool).share_memory_()

    def owner(self, worker: int) -> int:
        """The rank of which the others get this worker's batches."""
        return worker % self._ranks

    def set(self, *, is_on: bool) -> None:
        """Whether this rank's workers load only what it owns, as soon as they see it."""
        self._is_on.fill_(is_on)

    def is_owned(self) -> bool:
        """Whether this rank's worker that asks has to load its batches."""
        return not self._is_on.item() or self.owner(_worker()) == self.rank


@dataclass(frozen=True)
class WorkerBatch:
    """What a worker answers."""

    worker: int
    batch: Any = None
    """None if another rank's worker loads it."""
    effect: str = ""
    """What loading has changed beside the batches, as a predicate."""
    without_core: float = 0.0
    """The share of its time in which the worker waited for a core."""

    def pin_memory(self) -> WorkerBatch:
        """Called by torch's thread, where the loader pins."""
        return replace(self, batch=pin_memory(self.batch))


class CoreWait:
    """How long this process waits for a core, which on Linux the kernel counts."""

    def __init__(self) -> None:
        self._last = (0.0, 0.0)

    def share(self) -> float:
        """The share of the time since the last call, between 0 and 1; 0 in the first call, and
        where it is not known."""
        before, self._last = self._last, (perf_counter(), _seconds_without_core())
        if not before[0]:
            return 0.0
        passed, waited = (now - then for now, then in zip(self._last, before, strict=True))
        return min(1.0, waited / passed)


def _seconds_without_core() -> float:
    """Since this process began; from the kernel's Documentation/scheduler/sched-stats.rst."""
    try:
        return int(Path("/proc/self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class WorkerDataset(Dataset[Any]):
    """A data set from which workers load by indices."""

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], division: WorkerDivision
    ) -> None:
        self.dataset, self.division = dataset, division
        self._collate = collate
        self._effects: LoadingEffects | None = None
        self._until_end = ExitStack()
        self._core_wait = CoreWait()

    def __getitem__(self, index: Any) -> Any:
        self._watch()
        with OwnFrames():
            return self.dataset[index] if self.division.is_owned() else _ABSENT

    def __getitems__(self, indices: Any) -> Any:
        self._watch()
        if not self.division.is_owned():
            return [_ABSENT]
        with OwnFrames():
            load = getattr(self.dataset, "__getitems__", None)
            return load(indices) if load else [self.dataset[index] for index in indices]

    def collate(self, samples: Any) -> WorkerBatch:
        """The loader's collate_fn."""
        last = samples[-1] if type(samples) is list and samples else samples
        if last is _ABSENT:
            return WorkerBatch(_worker())
        with OwnFrames():
            batch = self._collate(samples)
        assert self._effects is not None
        effect, _ = self._effects.describe(draws=False)
        effect = effect or ("prints" if self._effects.prints else "")
        return WorkerBatch(_worker(), batch, effect, self._core_wait.share())

    def _watch(self) -> None:
        """From now on until this worker ends."""
        if self._effects is None:
            self._effects = LoadingEffects(None)
            self._until_end.enter_context(self._effects.watching_prints())


class WorkerStream(WorkerDataset, IterableDataset[Any]):
    """A data set that workers iterate over."""

    def __iter__(self) -> Iterator[Any]:
        self._watch()
        with OwnFrames():
            return self._samples(iter(self.dataset) if self.division.is_owned() else None)

    def _samples(self, own: Iterator[Any] | None) -> Iterator[Any]:
        while own is not None and self.division.is_owned():
            with OwnFrames():
                sample = next(own, _END)
            if sample is _END:
                return
            yield sample
        yield from repeat(_ABSENT)


def _worker() -> int:
    info = get_worker_info()
    assert info is not None
    return info.id
