"""Loads samples, each from a random stream of its own, and finds out what that does and takes.

Samples that draw random numbers and are small are loaded as in plain Python, by every rank: to load
such a sample takes no longer than to seed the generators for it. All ranks must decide that alike,
and any number of ranks as one. So it is decided by what is the same everywhere: how many functions
a sample calls and how large it is. Time is not.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from types import FrameType
from typing import Any

from instep.distributed.watchdog.signals.rank_signals import is_from_signal
from instep.training.random_streams import RNGStates, derive_seed, seed_all
from instep.unedited.data.dataset_state import DatasetState, Variable
from instep.unedited.data.loading_effects import buffered_prints
from instep.unedited.data.packed_samples import CannotPackError, pack

_MOST_CALLS = 32
"""Of functions in Python and in C, for a small sample. It opens no file."""
_MOST_BYTES = 16 * 1024
"""Of the tensors and arrays of a small sample."""


@dataclass
class SampleEffects:
    """What loading samples of a data set does beside loading, as far as is known."""

    generators: frozenset[str] | None = None
    """The names of the global generators that they draw from; None: not known yet."""
    changes: bool = True
    """Whether they change what the data set holds."""


class SampleLoader:
    """Loads samples of a data set, in the process that loads them.

    Args:
        dataset: the script's.
        variables: the global variables that it names.
        effects: what is known of its samples; kept up to date.
    """

    def __init__(self, dataset: Any, variables: Sequence[Variable], effects: SampleEffects) -> None:
        self.effects = effects
        self._dataset = dataset
        self._variables = variables

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is spawned: without the script's variables, of which it has others."""
        return vars(self) | {"_variables": ()}

    def state(self, indices: Sequence[Any]) -> DatasetState:
        """What the data set holds now, these samples included."""
        return DatasetState(self._dataset, self._variables, indices)

    def load_as_plain(self, indices: Sequence[Any]) -> list[Any]:
        """Load samples from the global generators as they are."""
        return self._load(indices, partial(getitem, self._dataset))

    def load(
        self, indices: Sequence[Any], seed: int, first: int, *, counts: bool = False
    ) -> tuple[list[Any], bool | None]:
        """Load samples, each from the stream of the seed and its number; `first` is that of the
        first. The global generators stay as they are.

        Returns the samples; and, if `counts`, whether those that draw are small and loading does
        nothing else. None if none draws.
        """
        one = 1 if self.effects.generators is None else 0  # most often one sample shows it
        samples: list[Any] = []
        counters: list[_Counter] = []
        for part in filter(None, (indices[:one], indices[one:])):
            loaded = None
            while loaded is None:
                counter = _Counter() if counts and self.effects.generators else None
                loaded = self._try_to_load(part, seed, first + len(samples), counter)
            samples += loaded
            counters += [] if counter is None else [counter]
        if not any(counter.drawn for counter in counters):
            return samples, None
        are_small = all(counter.are_small for counter in counters)
        return samples, are_small and not self.effects.changes

    def load_one(self, index: Any, seed: int, number: int, generators: frozenset[str]) -> Any:
        """Load a sample from its stream, with these generators seeded, which stay so."""
        return self._load_seeded([index], seed, number, generators)[0]

    def _try_to_load(
        self, indices: Sequence[Any], seed: int, first: int, counter: _Counter | None
    ) -> list[Any] | None:
        """Load samples with those generators seeded that samples have drawn from so far, since
        seeding takes longer than many a sample. None if any draws from another one; then that is
        known, and all else as it was."""
        seeded = self.effects.generators or frozenset()
        before = RNGStates.capture()
        state = self.state(indices) if self.effects.changes else None
        with buffered_prints() as release:
            try:
                samples = self._load_seeded(indices, seed, first, seeded, counter)
            except BaseException as error:  # of the script's data set
                if not self._restore_generators(before, seeded) or is_from_signal(error):
                    raise
                is_again = True
            else:
                is_again = self._restore_generators(before, seeded)
            if is_again:
                if state is not None:
                    state.restore()
                return None
            has_printed = release()
        if state is not None:
            self.effects.changes = bool(state.find_change(draws=bool(seeded))[0])
        if counter is not None and has_printed:
            counter.are_small = False
        return samples

    def _restore_generators(self, before: RNGStates, seeded: frozenset[str]) -> bool:
        """Restore the global generators; returns whether samples have drawn from others than those
        that were seeded, which is known from now on."""
        changed = before.changed_generators(RNGStates.capture())
        before.restore(changed)
        self.effects.generators = seeded | changed
        return not changed <= seeded

    def _load_seeded(
        self,
        indices: Sequence[Any],
        seed: int,
        first: int,
        generators: frozenset[str],
        counter: _Counter | None = None,
    ) -> list[Any]:
        load: Callable[[Any], Any] = partial(getitem, self._dataset)
        if counter is not None:
            load = partial(counter.load, load)
        if not generators:
            return self._load(indices, load)
        numbers = iter(range(first, first + len(indices)))

        def load_seeded(index: Any) -> Any:
            seed_all(derive_seed(seed, next(numbers)), generators)
            return load(index)

        return self._load(indices, load_seeded)

    def _load(self, indices: Sequence[Any], load: Callable[[Any], Any]) -> list[Any]:
        samples, index = [], None
        try:
            for index in indices:
                samples.append(load(index))
        except Exception as error:
            error.add_note(f"This was sample {index!r} of {type(self._dataset).__name__}.")
            raise
        return samples


class _Counter:
    """Finds out whether samples that draw random numbers are small."""

    def __init__(self) -> None:
        self.drawn = 0
        """How many samples have drawn any."""
        self.are_small = True

    def load(self, load: Callable[[Any], Any], index: Any) -> Any:
        """`load(index)`."""
        before = RNGStates.capture()
        sample, calls = counting_calls(load, index)
        if before.changed_generators(RNGStates.capture()):
            self.drawn += 1
            self.are_small &= calls <= _MOST_CALLS and _is_small(sample)
        return sample


def _is_small(sample: Any) -> bool:
    try:
        return pack(sample).memory.nbytes <= _MOST_BYTES
    except CannotPackError:
        return False


def counting_calls(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """`function(*args)`, and how many functions were called by this thread; one that opens a file
    counts as more than a small sample calls. A profiler of the script's does not see them."""
    count = 0

    def note(frame: FrameType, event: str, called: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += _MOST_CALLS + 1 if called is io.open else 1

    profiler: Any = sys.getprofile()
    sys.setprofile(note)
    try:
        result = function(*args)
    finally:
        sys.setprofile(None)
        if callable(profiler):
            sys.setprofile(profiler)
        if hasattr(profiler, "enable"):  # cProfile's, until Python 3.11
            profiler.enable()
    return result, count
