"""Finds out whether a data set has a random generator of its own, besides the global ones.

A sample then depends on how many were loaded before it, so the ranks cannot share the loading.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from instep.distributed.generator_states import is_generator, is_global
from instep.unedited.objects.referents import referents, walk
from instep.unedited.objects.script_code import functions_of, is_of_script, named_spaces, names_in

_MAX_OBJECTS = 2000
"""Enough for any chain of transforms, not for the samples themselves."""
_MAX_ENTRIES = 16
"""Of a list or dict."""


def find_generator(dataset: object) -> str | None:
    """Where a data set holds a random generator, such as "self.rng"; None if none is found.

    Looks at attributes, entries of containers, and what functions and methods hold and name.
    """
    for path, value in walk([("self", dataset)], _follow, _MAX_OBJECTS):
        if is_generator(value) and not is_global(value):
            return path
    return None


def find_variables(dataset: object) -> list[tuple[str, dict[str, Any]]]:
    """The global variables of the script that the functions of a data set name, but functions,
    classes and modules: the name of each, and the dict that holds it."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for _, value in walk([("self", dataset)], _follow, _MAX_OBJECTS):
        if isinstance(value, types.FunctionType) and is_of_script(value):
            for _, space in named_spaces(value):
                found |= {(name, id(space)): space for name in names_in(value.__code__)}
    left_out = (type, types.FunctionType, types.ModuleType)
    return [
        (name, space)
        for (name, _), space in found.items()
        if name in space and not isinstance(space[name], left_out)
    ]


def may_set_generator(init: object) -> bool:
    """Whether a worker_init_fn may give the data set of a worker a generator of its own, as in
    `get_worker_info().dataset.rng = default_rng(seed)`."""
    code = getattr(getattr(init, "func", init), "__code__", None)
    return code is not None and "dataset" in names_in(code)


def _follow(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a value leads to."""
    if is_generator(value):
        return
    if isinstance(value, type):
        if is_of_script(value):
            yield from _of_class(path, value)
        return
    yield from ((f"{path}{key}", entry) for key, entry in referents(value, _MAX_ENTRIES))
    if isinstance(value, types.FunctionType):
        for prefix, space in named_spaces(value):
            names = names_in(value.__code__)
            yield from ((f"{prefix}{name}", space[name]) for name in names if name in space)
    for base in type(value).__mro__:
        if base.__module__.partition(".")[0] not in ("builtins", "torch", "numpy", "random"):
            yield from _of_class(path, base)


def _of_class(path: str, cls: type) -> Iterator[tuple[str, Any]]:
    """The generators that a class holds, and its functions."""
    yield from ((f"{path}.{key}", entry) for key, entry in vars(cls).items() if is_generator(entry))
    yield from ((f"{path}.{each.__name__}", each) for each in functions_of(cls))
