"""The position of a loop in a DataLoader that is not sharded: torch's own, or one with a state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.process.patching import Function, Patch, PatchHandle
from instep.training.errors import OtherDataError
from instep.training.loaders.generators import generators_of, get_states, set_states
from instep.training.random_streams import RNGStates

_positions: WeakKeyDictionary[DataLoader[Any], PlainLoaderPosition] = WeakKeyDictionary()


def track(loader: DataLoader[Any]) -> PlainLoaderPosition:
    """The position of loops over `loader`, counted from now on."""
    if not loader.in_order:
        raise ValueError(
            "a DataLoader with in_order=False gives its batches in no order that could be resumed; "
            "leave in_order=True."
        )
    # For good: an iteration that goes on when it is removed would not be counted.
    PatchHandle([Patch(DataLoader, "__iter__", _iterate, compile="break")])
    return _positions.setdefault(loader, PlainLoaderPosition(loader))


def _iterate(original: Function, loader: DataLoader[Any]) -> Any:
    position = _positions.get(loader)
    return original(loader) if position is None else position.iterate(original, loader)


class PlainLoaderPosition:
    """The position in the last epoch of one DataLoader that was begun.

    Its order is drawn from global generators, whose states at the beginning of the epoch are
    therefore a part of the position.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._described = _describe(loader)
        self._generators = generators_of(loader)
        self._batches = 0
        self._has_ended = True
        self._resumes = False
        self._begin: dict[str, Any] | None = None
        """The states of generators before the epoch."""
        self._iteration = 0
        self._has_workers = self._had_workers = self._is_loaded = False
        """Whether there are persistent workers, which no later epoch draws a seed for; whether
        there were before the last epoch; whether no epoch was begun since a checkpoint was loaded,
        when they have to be started again."""

    def iterate(self, original: Function, loader: DataLoader[Any]) -> CountedBatches:
        """torch's iterator, that counts, and goes on where a checkpoint was saved."""
        self._iteration += 1
        if not self._resumes:
            self._begin = {
                "global": dict(vars(RNGStates.capture())),
                "loader": get_states(loader),
            }
            self._batches, self._has_ended = 0, False
            return CountedBatches(self, self._begin_epoch(original, loader), self._iteration)
        self._resumes = False
        assert self._begin is not None
        now = RNGStates.capture()
        RNGStates(**self._begin["global"]).restore()
        set_states(loader, self._begin["loader"])
        batches = self._begin_epoch(original, loader)
        try:
            _skip(batches, self._batches, loader)
        finally:
            now.restore()
        return CountedBatches(self, batches, self._iteration)

    def _begin_epoch(self, original: Function, loader: DataLoader[Any]) -> Any:
        starts_again = self._is_loaded and loader.persistent_workers
        self._had_workers, self._has_workers = self._has_workers, loader.persistent_workers
        self._is_loaded = False
        if not starts_again:
            return original(loader)
        loader._iterator = None
        before = loader.generator
        if self._had_workers:
            loader.generator = torch.Generator().manual_seed(self._iteration)
        try:
            return original(loader)
        finally:
            loader.generator = before

    def count(self, iteration: int, *, has_ended: bool) -> None:
        """The loop of the last iteration that was begun has taken a batch, or has ended."""
        if iteration == self._iteration:
            self._batches += not has_ended
            self._has_ended = has_ended

    def end_epoch(self) -> None:
        """Let the next iteration begin a new epoch."""
        self._has_ended, self._resumes = True, False

    def state_dict(self) -> dict[str, Any]:
        """The position as values for a checkpoint."""
        begin = None if self._has_ended else self._begin
        batches = 0 if self._has_ended else self._batches
        states = [each.get_state() for each in self._generators] if self._has_ended else []
        return {
            "batches": batches,
            "begin": begin,
            "loader": self._described,
            "generators": states,
            "has_workers": self._has_workers if self._has_ended else self._had_workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on at a position. Raises OtherDataError."""
        self._begin, self._batches = state["begin"], state["batches"]
        self._resumes = self._begin is not None
        self._has_ended = not self._resumes
        self._has_workers, self._is_loaded = state.get("has_workers", False), True
        if self._resumes and state["loader"] != self._described:
            raise OtherDataError(
                f"the checkpoint was saved after {self._batches} batches of an epoch of "
                f"{state['loader']}; the loader has {self._described}, so the rest of that epoch "
                "is not known. Use the same data and batch size, or resume from a checkpoint at "
                "the end of an epoch."
            )
        if self._has_ended:
            for generator, saved in zip(self._generators, state["generators"], strict=True):
                generator.set_state(saved)


class StatefulLoader:
    """A DataLoader with a state of its own, such as torchdata's StatefulDataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """The loader's, with the states of its generators."""
        return {"loader": self._loader.state_dict(), "generators": get_states(self._loader)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where it was."""
        self._loader.load_state_dict(state["loader"])
        # torchdata makes the iterator now, and not when the global generators have been restored:
        # it draws from them, as the iterator before the checkpoint has done.
        self._loader.state_dict()
        set_states(self._loader, state["generators"])


class CountedBatches:
    """An iterator over batches that counts those that the loop has taken."""

    def __init__(self, position: PlainLoaderPosition, batches: Any, iteration: int) -> None:
        self._position = position
        self._batches = batches
        self._iteration = iteration

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._position.count(self._iteration, has_ended=True)
            raise
        self._position.count(self._iteration, has_ended=False)
        return batch


def _describe(loader: DataLoader[Any]) -> str:
    """What must be the same for the rest of an epoch to be known."""
    samples = "?" if isinstance(loader.dataset, IterableDataset) else len(loader.dataset)  # type: ignore[arg-type]
    return f"{samples} samples in batches of {loader.batch_size}"


def _skip(batches: Any, count: int, loader: DataLoader[Any]) -> None:
    """Pass over batches that were taken before a checkpoint.

    Workers have to load them again: what is random in a sample depends on those before it.
    """
    by_index = loader.num_workers == 0 and not isinstance(loader.dataset, IterableDataset)
    for seen in range(count):
        try:
            batches._next_index() if by_index else next(batches)
        except StopIteration:
            raise OtherDataError.of_batches(count, seen, "batches") from None
    if by_index:
        batches._num_yielded += count
