"""The states of the global generators on the CPU: torch's, Python's, and numpy's if in use."""

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


def get_states() -> dict[str, Any]:
    """The states now, by the generators' names."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
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


def _digest(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        state = state.numpy().tobytes()
    return blake2b(pickle.dumps(state), digest_size=16).digest()
