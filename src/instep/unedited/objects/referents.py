"""What an object refers to: the entries of a container, attributes, and what a function holds."""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from instep.training.pytree import PLAIN, SEQUENCES, attributes_of, is_value

SET_ENTRY = ".item "
"""In the path of an entry of a set: objects have another order there in each run."""
_WEAK: tuple[type, ...] = (
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
_NO_REFERENTS = (Tensor, np.ndarray, type, types.ModuleType)


def walk(
    values: Iterable[tuple[str, Any]],
    follow: Callable[[str, Any], Iterable[tuple[str, Any]]],
    most: int,
) -> Iterator[tuple[str, Any]]:
    """The objects to which these values lead, themselves first, with their paths: each once, the
    nearest first, at most so many. Strings and numbers are left out.

    follow: which objects one leads to, given its path, with their paths.
    """
    known: dict[int, Any] = {}
    waiting = deque(values)
    while waiting and len(known) < most:
        path, value = waiting.popleft()
        if id(value) not in known and not isinstance(value, PLAIN):
            known[id(value)] = value
            yield path, value
            waiting.extend(follow(path, value))


def referents(value: Any, most: int | None = None) -> Iterator[tuple[str, Any]]:
    """What an object refers to, each with the end of a path to it.

    Of a container the first `most` entries. Not the class of an object and not the global variables
    that a function names: see `script_code`. What is in a cell, a variable of a closure, has the
    path of the cell.
    """
    if isinstance(value, dict):
        for k, (key, entry) in enumerate(islice(dict.items(value), most)):
            yield (f"[{key!r}]" if is_value(key) else f"[#{k}]"), entry
            if not is_value(key):
                yield f".key{k}", key
    elif isinstance(value, SEQUENCES):
        is_set = isinstance(value, set | frozenset)
        kind: Any = next(each for each in SEQUENCES if isinstance(value, each))
        for k, entry in enumerate(islice(kind.__iter__(value), most)):
            yield (f"{SET_ENTRY}{k}" if is_set else f"[{k}]"), entry
    elif isinstance(value, types.CellType):
        if not is_empty_cell(value):
            yield "", value.cell_contents
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
        return  # its attributes are the function's
    elif isinstance(value, partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f".{name}", cell) for name, cell in cells)
        yield from ((f"({name})", default) for name, default in default_arguments(value))
    elif is_bound_builtin(value):
        yield ".__self__", value.__self__
    if not isinstance(value, _NO_REFERENTS):
        yield from ((f".{name}", entry) for name, entry in attributes_of(value).items())


def is_bound_builtin(value: Any) -> bool:
    """Whether this is a method of an object whose class is written in C, `list.append` of one."""
    is_builtin = isinstance(value, types.BuiltinMethodType)
    return is_builtin and not isinstance(value.__self__, type | types.ModuleType | None)


def may_lead_to(value: object, target: object) -> bool:
    """Whether this is the target, or refers weakly to something that may be it."""
    return value is target or isinstance(value, _WEAK)


def is_empty_cell(cell: types.CellType) -> bool:
    """Whether a variable of a closure has no value yet, or none any more."""
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def default_arguments(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The values that its arguments have where they are not given, by the arguments' names."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return [*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()]
