"""What a namespace held when it was last looked at: values, objects, counters."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
from torch import Tensor, nn

from instep.training.pytree import PLAIN, SEQUENCES
from instep.unedited.objects.graph_node import HOOK_TABLES, GraphNode
from instep.unedited.objects.library_state import is_of_library
from instep.unedited.objects.script_code import is_of_script

MAX_NAMES = 64
"""Larger dicts are data, and not looked at."""
MAX_ITEMS = 32
"""Of a longer list only the length is looked at."""

OTHER_OBJECT = object()
"""In place of the value: another object than before, or more or fewer of them."""
Key = tuple[str, int, str]
"""The path of a namespace, which of those of this path it is, and a name in it."""


class Table:
    """The values in one namespace, as they were when it was last looked at."""

    __slots__ = ("get", "key", "length", "names", "values", "where")

    def __init__(self, path: str, where: Any, names: list[str], *, is_sized: bool = False) -> None:
        """`is_sized`: whether more or fewer values count as a change."""
        self.key, self.where, self.names = (path, 0), where, tuple(names)
        is_mapping = isinstance(where, dict | types.MappingProxyType)
        getter = itemgetter if is_mapping else attrgetter
        self.get: Callable[[Any], tuple[Any, ...]] = getter(*names, names[0])
        if isinstance(where, ContextVar):
            self.get = _value_of
        self.length = len(where) if is_sized else -1
        self.values = self.get(where)

    def is_resized(self) -> bool:
        """Whether there are more or fewer values."""
        return 0 <= self.length != len(self.where)


def changed_tables(tables: Iterable[Table]) -> list[Table]:
    """The tables in which anything is not as it was."""
    # Before and after every call, for every module: no call for each table.
    return [
        table
        for table in tables
        if table.get(table.where) != table.values or 0 <= table.length != len(table.where)
    ]


class Items:
    """Which objects are in a list, or which values in a set of plain ones; of other containers, and
    of long ones, only how many."""

    __slots__ = ("items", "key", "length", "where")

    def __init__(self, path: str, where: Any) -> None:
        self.key, self.where = (path, 0), where
        self.update()

    def update(self) -> None:
        """Note what is in it now."""
        self.length = len(self.where)
        self.items: tuple[Any, ...] | frozenset[Any] = ()
        if self.length <= MAX_ITEMS and isinstance(self.where, list | deque):
            self.items = tuple(self.where)
        elif isinstance(self.where, set) and is_sequence(self.where):
            self.items = frozenset(self.where)

    def has_changed(self) -> bool:
        """Whether anything is not as it was."""
        if len(self.where) != self.length:
            return True
        if isinstance(self.items, frozenset):
            return bool(self.where != self.items)
        return not all(map(is_, self.where, self.items))


class Counters:
    """The numbers and truth values in tensors of no dimension, which a forward may read: no floats
    on an accelerator, for which one would have to wait, and none that are trained."""

    __slots__ = ("tensors", "versions")

    def __init__(self, values: Iterable[Tensor | None]) -> None:
        self.tensors = [x for x in values if x is not None and (_is_counter(x) or _is_float(x))]
        self.versions = [x._version for x in self.tensors]

    def find_changes(self) -> dict[Key, Any]:
        """Those that were written to since this was last asked, and the floats among these."""
        versions = [x._version for x in self.tensors]
        if versions == self.versions:
            return {}
        both = enumerate(zip(versions, self.versions, strict=True))
        changed = [k for k, (now, before) in both if now != before]
        self.versions = versions
        pairs = ((k, self.tensors[k]) for k in changed)
        return {
            ("tensor", k, "version"): float(x) if x.is_floating_point() else OTHER_OBJECT
            for k, x in pairs
        }


def table_of(node: GraphNode) -> Table | None:
    """The table of what is looked at of a node; None if nothing is."""
    value = node.value
    if isinstance(value, types.CellType):
        return Table(node.path, value, ["cell_contents"]) if node.contents else None
    if isinstance(value, ContextVar):
        return Table(node.path, value, ["value"])
    if not isinstance(node.contents, dict):
        return None
    is_dict = isinstance(value, dict)
    where = value if is_dict else getattr(value, "__dict__", {})
    has_slots = is_of_script(type(value)) and any(name not in where for name in node.contents)
    is_of_torch = type(value).__module__.startswith("torch.")
    names = [
        name
        for name, each in node.contents.items()
        if (name in where or has_slots)
        and name not in HOOK_TABLES
        and (_is_looked_at(each) or (is_sequence(each) and not is_of_torch))
    ]
    if not names or (is_dict and not node.names and dict.__len__(value) > MAX_NAMES):
        return None
    if has_slots:
        return Table(node.path, value, names)
    is_sized = not (isinstance(value, type) or (is_dict and is_of_library(value)))
    return Table(node.path, where, names, is_sized=is_sized)


def table_of_class(cls: type) -> Table | None:
    """The methods and plain values of a class of the script's."""
    names = [
        name
        for name, value in vars(cls).items()
        if not name.startswith("__") and isinstance(value, (*PLAIN, types.FunctionType))
    ]
    return Table(cls.__name__, vars(cls), names) if names else None


def _is_looked_at(value: Any) -> bool:
    """Whether this is compared: not tensors and arrays, which are data, but for counters."""
    if isinstance(value, Tensor):
        return _is_counter(value)
    if isinstance(value, (*PLAIN, dict, np.generic, types.FunctionType, types.BuiltinFunctionType)):
        return True
    is_other = isinstance(value, (nn.Module, type, types.ModuleType))
    return not is_other and hasattr(value, "__dict__")


def _is_counter(tensor: Tensor) -> bool:
    """Whether this is a whole number or a truth value."""
    if type(tensor) is not Tensor or tensor.dim() or tensor.is_inference():
        return False
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_float(tensor: Tensor) -> bool:
    """Whether this is a float on the CPU that is not trained."""
    is_number = type(tensor) is Tensor and not tensor.dim() and tensor.is_floating_point()
    return is_number and tensor.is_cpu and not (tensor.requires_grad or tensor.is_inference())


def is_sequence(value: Any) -> bool:
    """Whether this is a short list, tuple or set of plain values."""
    kind = next((each for each in SEQUENCES if isinstance(value, each)), None)
    if kind is None or kind.__len__(value) > MAX_ITEMS:
        return False
    return all(isinstance(item, PLAIN) for item in kind.__iter__(value))


def _value_of(variable: ContextVar[Any]) -> tuple[Any, ...]:
    return variable.get(None), None
