"""Does a data set draw from a random generator of its own, and not from the global ones?

Then a sample depends on how many were loaded before it, and nobody can load it on its own.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

_GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
)
_GLOBAL = (random._inst, np.random.mtrand._rand, torch.default_generator)
_LOOKED_AT = 2000
"""How many objects: enough for any chain of transforms, not for the samples themselves."""
_ENTRIES = 16
"""How many entries of a list or dict."""


def find_generator(dataset: object) -> str | None:
    """Where a data set keeps a random generator, such as "self.rng"; None: nowhere.

    Looks at attributes, entries of containers, and what functions and methods refer to, so far as
    a few thousand objects show it.
    """
    seen: set[int] = set()
    waiting = deque([("self", dataset)])
    while waiting and len(seen) < _LOOKED_AT:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            if not any(value is known for known in _GLOBAL):
                return name
            continue
        waiting.extend(_within(name, value))
    return None


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is reached from a value, by name."""
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", entry) for key, entry in islice(value.items(), _ENTRIES))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"{name}[{k}]", entry) for k, entry in enumerate(islice(value, _ENTRIES)))
    elif isinstance(value, types.FunctionType):
        yield from _referred_to(value)
    elif isinstance(value, types.MethodType):
        yield from ((f"{name}.__self__", value.__self__), (name, value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((name, part) for part in (value.func, value.args, value.keywords))
    elif not isinstance(value, type | types.ModuleType | np.ndarray | torch.Tensor):
        attributes: Iterable[tuple[str, Any]] = getattr(value, "__dict__", {}).items()
        yield from ((f"{name}.{key}", entry) for key, entry in attributes)
        yield from _methods_of(name, type(value))


def _methods_of(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """The methods of the user's classes; a library's refer to no generator of the user's."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "random"):
            for key, entry in vars(base).items():
                if isinstance(entry, types.FunctionType):
                    yield f"{name}.{key}", entry


def _referred_to(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals and closed-over values that a function's code names."""
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
