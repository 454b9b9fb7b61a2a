"""What the functions that a forward may call consist of, and what they name, as a script changes it
between calls: code, default values, functions and classes by their names, the environment.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterable
from operator import attrgetter, itemgetter
from typing import Any

from instep.unedited.objects.referents import is_empty_cell
from instep.unedited.objects.script_code import named_modules, names_in

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_CODE = (*_FUNCTIONS, type, types.ModuleType)
_PARTS_OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OF_ENVIRONMENT = frozenset(["environ", "environb", "getenv", "getenvb"])


class CodeChanges:
    """These of some functions of the script's, and of modules' classes, as they were when they were
    last looked at."""

    __slots__ = ("_environment", "_functions", "_seen", "_variables", "_where")

    def __init__(
        self, functions: Iterable[types.FunctionType], classes: Iterable[type] = ()
    ) -> None:
        bases = dict.fromkeys(base for cls in {*classes} for base in cls.__mro__)
        having = [base for base in bases if "forward" in vars(base)]
        of_classes = (*functions, *(vars(base)["forward"] for base in having))
        self._functions = [each for each in of_classes if isinstance(each, types.FunctionType)]
        spaces: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        reads_environment = False
        for function in self._functions:
            names = names_in(function.__code__)
            reads_environment |= not _OF_ENVIRONMENT.isdisjoint(names)
            modules = (vars(module) for _, module in named_modules(function))
            for space in (function.__globals__, *modules):
                found = spaces.setdefault(id(space), (space, {}))[1]
                found.update((name, None) for name in names if _is_code(space.get(name)))
        self._where: list[tuple[Callable[[Any], Any], Any]] = [
            *((_PARTS_OF_FUNCTION, each) for each in self._functions),
            *((itemgetter(*names), space) for space, names in spaces.values() if names),
            *((attrgetter("forward"), base) for base in having),
        ]
        cells = (cell for each in self._functions for cell in each.__closure__ or ())
        with_code = (x for x in cells if not is_empty_cell(x) and _is_code(x.cell_contents))
        self._where += ((attrgetter("cell_contents"), cell) for cell in with_code)
        self._environment: dict[Any, Any] = getattr(os.environ, "_data", {})
        if not reads_environment:
            self._environment = {}
        self._variables = self._environment.copy()
        self._seen: list[Any] = []
        self.has_changed()

    def has_changed(self) -> bool:
        """Whether anything is not as it was when this was last asked."""
        seen: list[Any] = []
        try:
            for get, owner in self._where:
                seen.append(get(owner))
            has_changed = bool(seen != self._seen)
        except Exception:  # a name is gone, or the script's values cannot be compared
            has_changed = True
        self._seen = seen
        if self._environment != self._variables:
            self._variables, has_changed = self._environment.copy(), True
        return has_changed


def _is_code(value: object) -> bool:
    """Whether this is a function, a class or a module, or a tuple of such."""
    if isinstance(value, tuple):
        return any(isinstance(each, _CODE) for each in value)
    return isinstance(value, _CODE)
