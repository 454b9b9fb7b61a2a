"""The script's own functions and classes, and the variables that functions name."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from instep.process import is_script_file

_AROUND_FUNCTIONS = (
    *(staticmethod, classmethod, property),
    *(functools.cached_property, functools.partialmethod, functools.singledispatchmethod),
)
_INSIDE = ("__func__", "fget", "fset", "fdel", "func")
"""The attributes in which these keep their functions."""


def is_of_script(value: Any) -> bool:
    """Whether a function, class or module is the script's own and not a library's."""
    if isinstance(value, type):
        space: Mapping[str, Any] = getattr(sys.modules.get(value.__module__), "__dict__", {})
    else:
        space = vars(value) if isinstance(value, types.ModuleType) else value.__globals__
    file = space.get("__file__")
    return space.get("__name__") == "__main__" if file is None else is_script_file(str(file))


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """The functions that a class defines itself, those of its properties among them."""
    for each in list(vars(cls).values()):
        inside = [each]
        if isinstance(each, _AROUND_FUNCTIONS):
            inside = [getattr(each, name, None) for name in _INSIDE]
        yield from (function for function in inside if isinstance(function, types.FunctionType))


def named_spaces(function: types.FunctionType) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where global variables are that a function may name: its own module, and those of the
    script's modules that it names, after the beginning of a path."""
    space = function.__globals__
    yield "", space
    for name in names_in(function.__code__):
        value = space.get(name)
        if isinstance(value, types.ModuleType) and is_of_script(value):
            yield f"{name}.", vars(value)


def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of global variables and attributes in a function and in those inside of it."""
    inside = (names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inside for name in names)]))
