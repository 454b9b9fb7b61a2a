"""The states of generators of random numbers: of any, and of the global ones on the CPU."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch

Changes = dict[str, tuple[bytes, Any]]
"""The digest of a generator's state before, and its state after, by the generator's name."""


def is_generator(value: object) -> bool:
    """Whether this is a generator of random numbers: torch's, Python's or numpy's."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = _numpy_random()
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))


def state_of(generator: Any) -> Any:
    """Its state, as a tensor or plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Let it go on from `state_of` such a generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def describe_state(generator: Any) -> str | bytes:
    """Its state, as something that is equal where nothing was drawn in between."""
    state = state_of(generator)
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)


def get_states() -> dict[str, Any]:
    """The states of the global generators now, by their names; of numpy's if it is in use."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := _numpy_random()) is not None:
        states["numpy"] = numpy.get_state(legacy=False)
    return states


def find_changes(before: Mapping[str, Any]) -> Changes:
    """What has changed since these were the states."""
    changes = {}
    for name, state in get_states().items():
        if name in before and (old := _digest(before[name])) != _digest(state):
            changes[name] = old, state
    return changes


def follow(changes: Changes) -> None:
    """Set the generators that are in the state from before the change to the one after it."""
    own = get_states()
    for name, (before, after) in changes.items():
        if name not in own or _digest(own[name]) != before:
            continue
        if name == "torch":
            torch.set_rng_state(after)
        elif name == "python":
            random.setstate(after)
        else:
            sys.modules["numpy.random"].set_state(after)


def _numpy_random() -> Any:
    """The module, if it is in use: not every process needs it, and its import takes a while."""
    return sys.modules.get("numpy.random")


def _digest(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        state = state.numpy().tobytes()
    return blake2b(pickle.dumps(state), digest_size=16).digest()
