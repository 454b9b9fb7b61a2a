"""The states of generators of random numbers: of any, and of the global ones on the CPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch

from instep.process import in_main_thread

_others: WeakKeyDictionary[Any, dict[int, torch.Generator]] = WeakKeyDictionary()
"""The generators of loaders, which are in step on all ranks, by their numbers. (PyTorch 2.11 has no
weak references to a generator.)"""
_numbers = count()
Changes = dict[str, tuple[str, Any]]
"""The hash of a generator's state before, and its state after, by the generator's name."""


def is_generator(value: object) -> bool:
    """Whether this is a generator of random numbers: torch's, Python's or numpy's."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = _numpy_random()
    return numpy is not None and isinstance(
        value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    )


def is_global(generator: object) -> bool:
    """Whether this is one of those that torch's, Python's and numpy's functions draw from."""
    return any(generator is each for each in _global_generators().values())


def state_of(generator: Any) -> Any:
    """Its state, as a tensor or plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    source = getattr(generator, "bit_generator", generator)
    return source.state if hasattr(source, "state") else source.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Let it go on from `state_of` such a generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        source = getattr(generator, "bit_generator", generator)
        if hasattr(source, "state"):
            source.state = state
        else:
            source.set_state(state)


def seed_generator(generator: Any, seed: int) -> None:
    """Let it begin anew with a seed of 63 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "seed"):  # numpy's RandomState
        generator.seed(seed % 2**32)
    else:
        source = getattr(generator, "bit_generator", generator)
        source.state = type(source)(seed).state


def describe_state(generator: Any) -> str | bytes:
    """Its state, as something that is equal where nothing was drawn in between."""
    state = state_of(generator)
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)


def hash_states(states: Iterable[Any]) -> str:
    """A hash of states of generators, which is equal on all ranks where the states are."""
    digest = blake2b(digest_size=16)
    for state in states:
        for part in _parts(state):
            digest.update(part)
    return digest.hexdigest()


def _parts(state: Any) -> Iterator[bytes]:
    if isinstance(state, Mapping):  # numpy's, which are different ones of each of its generators
        for name in sorted(state):
            yield name.encode()
            yield from _parts(state[name])
    elif isinstance(state, torch.Tensor):
        yield state.numpy().tobytes()
    else:
        yield state.tobytes() if hasattr(state, "tobytes") else repr(state).encode()


class _SeparateStates:
    """What `separate_states` keeps."""

    states: dict[str, Any] | None = None
    """Those in which it was last left."""
    are_set = False
    """Whether the global generators have them now."""


_separate = _SeparateStates()


@contextmanager
def separate_states() -> Iterator[None]:
    """Inside, the global generators go on from where they were when this was last left; outside,
    they are as if nothing had been drawn. Another thread of the script draws as ever."""
    if _separate.are_set or not in_main_thread():
        yield
        return
    before, _separate.are_set = get_states(), True
    _set_states(before | (_separate.states or {}))
    try:
        yield
    finally:
        _separate.states, _separate.are_set = get_states(), False
        _set_states(before)


def keep_in_step(loader: object, generators: Iterable[torch.Generator]) -> None:
    """Treat the generators of a loader, of which every rank has its own, as the global ones are as
    long as there is the loader. Every rank calls this in the same order."""
    if loader not in _others:
        _others[loader] = {next(_numbers): generator for generator in generators}


def _global_generators() -> dict[str, Any]:
    """By their names; numpy's if it is in use."""
    found = {"torch": torch.default_generator, "python": random._inst}
    if (numpy := _numpy_random()) is not None:
        found["numpy"] = numpy.mtrand._rand
    return found


def _generators() -> dict[str, Any]:
    """The global generators, and those that are kept in step by their numbers."""
    kept = ((str(number), each) for of in _others.values() for number, each in of.items())
    return _global_generators() | dict(kept)


def get_states() -> dict[str, Any]:
    """The states of these generators now."""
    return {name: state_of(generator) for name, generator in _generators().items()}


def find_changes(before: Mapping[str, Any]) -> Changes:
    """What has changed since these were the states."""
    changes = {}
    for name, state in get_states().items():
        if name in before and (old := hash_states([before[name]])) != hash_states([state]):
            changes[name] = old, state
    return changes


def follow(changes: Changes) -> None:
    """Set the generators that are in the state from before the change to the one after it."""
    own = get_states()
    in_step = {
        name: after
        for name, (before, after) in changes.items()
        if name in own and hash_states([own[name]]) == before
    }
    _set_states(in_step)


def _set_states(states: Mapping[str, Any]) -> None:
    generators = _generators()
    for name, state in states.items():
        set_state(generators[name], state)


def _numpy_random() -> Any:
    """The module, if it is in use: not every process needs it, and its import takes a while."""
    return sys.modules.get("numpy.random")
