"""An object that a forward may change: what it contains, and how that is set back."""

from __future__ import annotations

import ctypes
import io
import types
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue as ProcessQueue
from operator import is_
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from instep.distributed.generator_states import (
    describe_state,
    is_generator,
    set_state,
    state_of,
)
from instep.training.pytree import attributes_of, items_of
from instep.unedited.objects.inner_values import WITH_INNER_VALUES, inner_values
from instep.unedited.objects.iterator_states import describe_iterator, is_iterator
from instep.unedited.objects.referents import is_empty_cell

MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
HOOK_TABLES = frozenset(nn.Module().__dict__) - MODULE_TABLES - {"training"}
_RECURRENT_TABLES = MODULE_TABLES | {"_flat_weights", "_flat_weight_refs"}
C_DATA = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_ABSENT = object()
_DICTS = (OrderedDict, defaultdict, dict)
_NOTHING: dict[Any, Any] = {}
"""What an empty dict contains: each module has a dozen, for its hooks."""


def is_table(part: nn.Module, name: str) -> bool:
    """Whether this attribute holds parameters, buffers or parts, as torch keeps them.

    A recurrent layer has a list of its weights, too, which its forward makes anew where one of them
    is another tensor, as a parametrised one is each time.
    """
    return name in _tables_of(part)


def _tables_of(part: nn.Module) -> frozenset[str]:
    return _RECURRENT_TABLES if isinstance(part, nn.RNNBase) else MODULE_TABLES


@dataclass(slots=True)
class GraphNode:
    """An object, and what it contained when it was visited."""

    path: str
    """The attribute or variable that leads to it, for messages."""
    value: Any
    names: tuple[str, ...] = ()
    """Of global variables, or of the attributes of a module or a library's class, those that
    count."""
    contents: Any = None
    state: Any = None
    """Of a generator of random numbers, so that it can go on from there."""

    def note(self) -> None:
        """Note what it contains now."""
        self.contents = self.read()
        if isinstance(self.contents, str | bytes) and is_generator(self.value):
            self.state = state_of(self.value)

    def read(self) -> Any:
        """What it contains now: values by name, values in order, or a state."""
        value = self.value
        if self.names:
            space = value if isinstance(value, dict) else vars(value)
            return {name: space[name] for name in self.names if name in space}
        kind = _kind_of(value)
        if kind is not None:
            return kind.read(value)
        state = _state_of(value)
        return attributes_of(value) if state is None else state

    def restore(self) -> None:
        """Let it contain again what it did, unless that is a file's position."""
        value, kept = self.value, self.contents
        if kept is _NOTHING and not value:
            return
        now = self.read()
        if is_same(now, kept):
            return
        kind = _kind_of(value)
        if isinstance(value, type):
            for name in kept.keys() | now.keys():
                _set_or_delete(value, name, kept.get(name, _ABSENT))
        elif self.names or (isinstance(kept, dict) and not isinstance(value, dict)):
            self._restore_names(kept, now)
        elif kind is not None and kind.write is not None:
            kind.write(value, kept)
        elif is_generator(value):
            set_state(value, self.state)

    def _restore_names(self, kept: dict[str, Any], now: dict[str, Any]) -> None:
        table = self.value if self.names else getattr(self.value, "__dict__", {})
        for name in now.keys() - kept.keys():
            if name in table:
                del table[name]
        for name, each in kept.items():
            if name in table or name not in now:
                table[name] = each
            elif now[name] is not each:
                object.__setattr__(self.value, name, each)


class _ObjectKind(NamedTuple):
    """How what objects of some types contain is read, and set back."""

    types: Any
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object] | None = None
    """Called with the object and what was read; None: nothing but its attributes changes."""


def _kind_of(value: Any) -> _ObjectKind | None:
    """That of an object; None: it contains its attributes, or has a state."""
    for kind in _KINDS:
        if isinstance(value, kind.types):
            return kind
    return None


def _read_module(module: nn.Module) -> dict[str, Any]:
    tables = _tables_of(module)
    return {k: v for k, v in module.__dict__.items() if k not in tables}


def _read_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    if type(value) in _DICTS:
        return dict(value) if value else _NOTHING
    return dict(_base_of(value).items(value))


def _write_dict(value: dict[Any, Any], kept: dict[Any, Any]) -> None:
    base = _base_of(value)
    base.clear(value)
    for key, each in kept.items():
        base.__setitem__(value, key, each)


def _base_of(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Python's own class of dicts that it belongs to: a subclass may forbid methods."""
    return next(base for base in _DICTS if isinstance(value, base))


def _write_list(value: list[Any], kept: list[Any]) -> None:
    list.__setitem__(value, slice(None), kept)


def _write_deque(value: deque[Any], kept: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, kept)


def _read_set(value: set[Any] | frozenset[Any]) -> set[Any]:
    return set(items_of(value))


def _write_set(value: set[Any], kept: set[Any]) -> None:
    set.clear(value)
    set.update(value, kept)


def _read_ndarray(value: np.ndarray[Any, Any]) -> Any:
    return _entries_of(value) if value.dtype.hasobject else value.copy()


def _write_ndarray(value: np.ndarray[Any, Any], kept: Any) -> None:
    if value.dtype.hasobject:
        _set_entries(value, iter(kept))
    else:
        value[...] = kept


def _write_bytes(value: bytearray, kept: np.ndarray[Any, Any]) -> None:
    value[:] = kept.tobytes()


def _write_array(value: array[Any], kept: np.ndarray[Any, Any]) -> None:
    value[:] = array(value.typecode, kept.tobytes())


def _read_cell(cell: types.CellType) -> list[Any]:
    return [] if is_empty_cell(cell) else [cell.cell_contents]


def _write_cell(cell: types.CellType, kept: list[Any]) -> None:
    _set_or_delete(cell, "cell_contents", kept[0] if kept else _ABSENT)


def _read_context_variable(variable: ContextVar[Any]) -> list[Any]:
    """Its value here, or its default; None if it has neither."""
    try:
        return [variable.get()]
    except LookupError:
        return [None]


def _write_context_variable(variable: ContextVar[Any], kept: list[Any]) -> None:
    variable.set(kept[0])


def _read_class(value: type) -> dict[str, Any]:
    return {k: v for k, v in vars(value).items() if not k.startswith("__")}


def _read_exception(value: BaseException) -> dict[str, Any]:
    return attributes_of(value) | {"args": value.args}


def _set_or_delete(owner: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        if getattr(owner, name, _ABSENT) is not value:
            setattr(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)


def is_same(now: Any, kept: Any) -> bool:
    """Whether these contents are the same objects."""
    if isinstance(now, dict):
        return list(now) == list(kept) and all(map(is_, now.values(), kept.values()))
    if isinstance(now, list):
        return len(now) == len(kept) and all(
            a is b or (isinstance(a, bytes) and a == b) for a, b in zip(now, kept, strict=True)
        )
    return isinstance(now, str | bytes | set) and bool(now == kept)


def _entries_of(array: np.ndarray[Any, Any]) -> list[Any]:
    """The objects in an array, and of each field that has none its bytes."""
    if names := array.dtype.names:
        return [entry for name in names for entry in _entries_of(array[name])]
    return list(array.flat) if array.dtype == object else [array.tobytes()]


def _set_entries(array: np.ndarray[Any, Any], entries: Iterator[Any]) -> None:
    """Let it have these `_entries_of` it again."""
    if names := array.dtype.names:
        for name in names:
            _set_entries(array[name], entries)
    elif array.dtype == object:
        for index in np.ndindex(array.shape):
            array[index] = next(entries)
    else:
        array[...] = np.frombuffer(next(entries), array.dtype).reshape(array.shape)


def _numbers_in(value: bytearray | array[Any]) -> np.ndarray[Any, Any]:
    code = value.typecode if isinstance(value, array) else "B"
    return np.frombuffer(bytes(value), code if code in "bBhHiIlLqQfd" else np.uint8)


_KINDS = (
    _ObjectKind(nn.Module, _read_module),
    _ObjectKind(dict, _read_dict, _write_dict),
    _ObjectKind(list, items_of, _write_list),
    _ObjectKind(tuple, items_of),
    _ObjectKind(deque, items_of, _write_deque),
    _ObjectKind(set, _read_set, _write_set),
    _ObjectKind(frozenset, _read_set),
    _ObjectKind(np.ndarray, _read_ndarray, _write_ndarray),
    _ObjectKind(bytearray, _numbers_in, _write_bytes),
    _ObjectKind(array, _numbers_in, _write_array),
    _ObjectKind(types.CellType, _read_cell, _write_cell),
    _ObjectKind(ContextVar, _read_context_variable, _write_context_variable),
    _ObjectKind(partial, lambda value: [value.func, value.args, value.keywords]),
    _ObjectKind(type, _read_class),
    _ObjectKind(WITH_INNER_VALUES, inner_values),
    _ObjectKind(BaseException, _read_exception),
)
"""The first that fits counts."""


def is_lasting(value: Any) -> bool:
    """Whether nothing sets this object back: an iterator, a file, a queue of which another thread
    may take something."""
    return is_iterator(value) or isinstance(value, io.IOBase | SimpleQueue)


def _state_of(value: Any) -> str | bytes | None:
    """The state of a generator, an iterator, a file, or of what processes share; None for other
    objects."""
    if is_generator(value):
        return describe_state(value)
    if is_iterator(value):
        return describe_iterator(value)
    if isinstance(value, io.IOBase):
        try:
            return str(value.tell())
        except (OSError, ValueError):  # no file, or closed
            return "no position"
    if isinstance(value, ProcessQueue):
        try:
            return str(value.qsize())
        except (NotImplementedError, OSError, ValueError):  # on macOS, or closed
            return "no length"
    if isinstance(value, C_DATA):
        return bytes(value)
    return None
