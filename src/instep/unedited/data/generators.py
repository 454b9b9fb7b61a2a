"""Finds out whether a data set has a random generator of its own, besides the global ones.

A sample then depends on how many were loaded before it, so the ranks cannot share the loading.
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

from instep.distributed.generator_states import is_generator
from instep.unedited.sharded_call.plan.object_graph import is_empty_cell, is_of_script

_GLOBAL = (random._inst, np.random.mtrand._rand, torch.default_generator)
_MAX_OBJECTS = 2000
"""Enough for any chain of transforms, not for the samples themselves."""
_MAX_ENTRIES = 16
"""Of a list or dict."""


def find_generator(dataset: object) -> str | None:
    """Where a data set holds a random generator, such as "self.rng"; None if none is found.

    Looks at attributes, entries of containers, and the names that functions and methods use.
    """
    seen: set[int] = set()
    waiting = deque([("self", dataset)])
    while waiting and len(seen) < _MAX_OBJECTS:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_source(value):
            if not any(value is known for known in _GLOBAL):
                return name
            continue
        waiting.extend(_children(name, value))
    return None


def may_set_generator(init: object) -> bool:
    """Whether a worker_init_fn may give the data set of a worker a generator of its own, as in
    `get_worker_info().dataset.rng = default_rng(seed)`."""
    code = getattr(getattr(init, "func", init), "__code__", None)
    return code is not None and "dataset" in code.co_names


def _is_source(value: object) -> bool:
    """Whether random numbers are drawn from this."""
    return is_generator(value) or isinstance(value, np.random.BitGenerator)


def _children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a value refers to, by name."""
    if isinstance(value, dict):
        items = islice(value.items(), _MAX_ENTRIES)
        yield from ((f"{name}[{key!r}]", entry) for key, entry in items)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"{name}[{k}]", entry) for k, entry in enumerate(islice(value, _MAX_ENTRIES)))
    elif isinstance(value, types.FunctionType):
        yield from _names_used(value)
    elif isinstance(value, types.MethodType):
        yield from ((f"{name}.__self__", value.__self__), (name, value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((name, part) for part in (value.func, value.args, value.keywords))
    elif not isinstance(value, type | types.ModuleType | np.ndarray | torch.Tensor):
        attributes: Iterable[tuple[str, Any]] = getattr(value, "__dict__", {}).items()
        yield from ((f"{name}.{key}", entry) for key, entry in attributes)
        yield from _of_class(name, type(value))


def _of_class(name: str, type_: type) -> Iterator[tuple[str, Any]]:
    """The methods and generators of the user's classes; those of libraries use none of these."""
    for base in type_.__mro__:
        if _is_of_user(base.__module__):
            for key, entry in vars(base).items():
                if isinstance(entry, types.FunctionType) or _is_source(entry):
                    yield f"{name}.{key}", entry


def _is_of_user(module: str) -> bool:
    return module.partition(".")[0] not in ("builtins", "torch", "numpy", "random")


def _names_used(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals, attributes of global modules, and closure variables that a function names."""
    names = function.__code__.co_names
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType) and is_of_script(value):
            yield from ((f"{name}.{key}", vars(value)[key]) for key in names if key in vars(value))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if not is_empty_cell(cell):
            yield name, cell.cell_contents
