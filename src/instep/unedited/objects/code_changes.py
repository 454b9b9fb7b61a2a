"""Changes of the code that a forward runs: a script may replace functions, default values, classes
and environment variables between two calls.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import Any

from instep.unedited.objects.referents import is_empty_cell
from instep.unedited.objects.script_code import named_modules, names_in

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_CODE = (*_FUNCTIONS, type, types.ModuleType)
_PARTS_OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_READS_ENVIRONMENT = frozenset(["environ", "environb", "getenv", "getenvb"])
Lookup = tuple[Callable[[Any], Any], Any]
"""A function and its argument, for which it returns code."""


class CodeChanges:
    """What some functions of the script's, and the forwards of modules' classes, consist of and
    name, as it was when it was last looked at."""

    __slots__ = ("_environment", "_lookups", "_seen", "_variables")

    def __init__(
        self, functions: Iterable[types.FunctionType], classes: Iterable[type] = ()
    ) -> None:
        bases = dict.fromkeys(base for cls in {*classes} for base in cls.__mro__)
        with_forward = [base for base in bases if "forward" in vars(base)]
        forwards = (vars(base)["forward"] for base in with_forward)
        watched = [x for x in (*functions, *forwards) if isinstance(x, types.FunctionType)]
        self._lookups: list[Lookup] = [
            *((_PARTS_OF_FUNCTION, function) for function in watched),
            *_named_code(watched),
            *((attrgetter("forward"), base) for base in with_forward),
            *_code_in_closures(watched),
        ]
        reads_environment = any(
            not _READS_ENVIRONMENT.isdisjoint(names_in(function.__code__)) for function in watched
        )
        self._environment: dict[Any, Any] = (
            getattr(os.environ, "_data", {}) if reads_environment else {}
        )
        self._variables = self._environment.copy()
        self._seen: list[Any] = []
        self.has_changed()

    def has_changed(self) -> bool:
        """Whether anything is not as it was when this was last asked."""
        seen: list[Any] = []
        try:
            for get, owner in self._lookups:
                seen.append(get(owner))
            has_changed = bool(seen != self._seen)
        except Exception:  # a name is gone, or the script's values cannot be compared
            has_changed = True
        self._seen = seen
        if self._environment != self._variables:
            self._variables, has_changed = self._environment.copy(), True
        return has_changed


def _named_code(functions: Iterable[types.FunctionType]) -> Iterator[Lookup]:
    """The functions, classes and modules that these name: one lookup for each namespace."""
    spaces: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    for function in functions:
        names = names_in(function.__code__)
        modules = (vars(module) for _, module in named_modules(function))
        for space in (function.__globals__, *modules):
            found = spaces.setdefault(id(space), (space, {}))[1]
            found.update((name, None) for name in names if _is_code(space.get(name)))
    return ((itemgetter(*names), space) for space, names in spaces.values() if names)


def _code_in_closures(functions: Iterable[types.FunctionType]) -> Iterator[Lookup]:
    cells = (cell for function in functions for cell in function.__closure__ or ())
    with_code = (x for x in cells if not is_empty_cell(x) and _is_code(x.cell_contents))
    return ((attrgetter("cell_contents"), cell) for cell in with_code)


def _is_code(value: object) -> bool:
    """Whether this is a function, a class or a module, or a tuple of such."""
    if isinstance(value, tuple):
        return any(isinstance(each, _CODE) for each in value)
    return isinstance(value, _CODE)
