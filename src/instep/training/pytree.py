"""Nested values: tuples, lists, dicts, what torch.utils._pytree knows, and beyond that dataclasses,
attrs classes, SimpleNamespace and subclasses of list, tuple and dict.

Other objects are leaves: a copy of them may lack what their class keeps elsewhere.
"""

from __future__ import annotations

import enum
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Generic
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

MAX_OBJECTS = 4096
"""How many objects `contents` visits at most, the nearest first."""

_PLAIN = (str, bytes, bool, int, float, complex, type(None))
_BASES = (OrderedDict, defaultdict, dict, list, tuple, types.SimpleNamespace, object)
_VALUES = (*_PLAIN, enum.Enum, torch.dtype, torch.device, torch.layout, torch.Size)
_NO_CONTENTS = (*_VALUES, Tensor, nn.Module, type, types.FunctionType, types.ModuleType)


@dataclass(frozen=True, slots=True)
class Node:
    """A nested value without its leaves. A leaf's place is None."""

    kind: type
    keys: Any
    """What tells two of this kind apart, beside the children."""
    children: tuple[Node | None, ...]
    build: Callable[[list[Any]], Any] = field(compare=False)
    """Makes such a value from its children."""


Structure = Node | None


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a nested value, and its structure.

    A list or tuple of plain values (strings, numbers) is one leaf: see `is_column`.
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, ())


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """`flatten` for a call's arguments; their structure builds the pair (args, kwargs)."""
    leaves: list[Any] = []
    places = [_flatten(value, leaves, ()) for value in (*args, *kwargs.values())]
    count, names = len(args), tuple(kwargs)

    def build(values: list[Any]) -> Any:
        return tuple(values[:count]), dict(zip(names, values[count:], strict=True))

    return leaves, Node(tuple, (count, names), tuple(places), build)


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    """A new value of this structure with these leaves."""
    return _unflatten(iter(leaves), structure)


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a nested value."""
    return flatten(value)[0]


def is_value(leaf: Any) -> bool:
    """Whether this is an immutable value, which can be compared."""
    return isinstance(leaf, _VALUES)


def is_column(value: Any) -> bool:
    """Whether this is a list or tuple, not empty, of strings, numbers and what is made of them:
    captions or file names, say, one per row.
    """
    return type(value) in (list, tuple) and len(value) > 0 and all(map(_is_data, value))


def find_tensors(value: Any) -> list[Tensor]:
    """The tensors that are in a value, those in objects of any class among them."""
    return [each for each in contents(value) if isinstance(each, Tensor)]


def contents(value: Any) -> list[Any]:
    """What can be reached from a value, itself first, each once; at most MAX_OBJECTS objects.

    Looks into containers and the attributes of objects, but not into tensors and modules. Of a
    generator its state is told, of an array its bytes.
    """
    found: list[Any] = []
    known = {id(value)}
    waiting = deque([value])
    while waiting and len(found) < MAX_OBJECTS:
        each = waiting.popleft()
        found.append(each)
        if isinstance(each, _NO_CONTENTS):
            continue
        for inner in _contents(each):
            if isinstance(inner, _PLAIN):
                found.append(inner)
            elif id(inner) not in known:
                known.add(id(inner))
                waiting.append(inner)
    return found


class Unchanged:
    """What is in a value now, to be compared with later."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._found = contents(value)
        self._versions = versions(self._found)

    def __bool__(self) -> bool:
        """Whether the value still contains the same objects, and its tensors the same numbers."""
        now = contents(self._value)
        return (
            len(now) == len(self._found)
            and all(map(_is_same, now, self._found))
            and versions(now) == self._versions
        )


def _flatten(value: Any, leaves: list[Any], above: tuple[int, ...]) -> Structure:
    if isinstance(value, Tensor) or is_value(value) or id(value) in above or is_column(value):
        leaves.append(value)
        return None
    parts = _parts(value)
    if parts is None:
        leaves.append(value)
        return None
    keys, children, build = parts
    above = (*above, id(value))
    return Node(type(value), keys, tuple(_flatten(c, leaves, above) for c in children), build)


def _unflatten(leaves: Iterator[Any], structure: Structure) -> Any:
    if structure is None:
        return next(leaves)
    return structure.build([_unflatten(leaves, child) for child in structure.children])


_Parts = tuple[Any, list[Any], Callable[[list[Any]], Any]]


def _parts(value: Any) -> _Parts | None:
    """Of a container its keys, its children, and how to make another one; None for a leaf."""
    kind = type(value)
    if kind in (list, tuple):
        return len(value), list(value), kind
    if kind is dict:
        names = tuple(value)
        return names, list(value.values()), lambda new: dict(zip(names, new, strict=True))
    children, spec = tree_flatten(value, is_leaf=lambda node: node is not value)
    if not spec.is_leaf():
        return spec, children, lambda new: tree_unflatten(new, spec)
    return _of_object(value) if _is_container(kind) else None


def _is_container(kind: type) -> bool:
    if issubclass(kind, nn.Module) or _hides_something(kind):
        return False
    return (
        is_dataclass(kind)
        or hasattr(kind, "__attrs_attrs__")
        or issubclass(kind, types.SimpleNamespace | dict | list | tuple)
    )


def _hides_something(kind: type) -> bool:
    """Whether a class written in C is among its bases, whose state cannot be seen from Python."""
    made_by_python = 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return any(
        base not in (*_BASES, Generic) and not base.__flags__ & made_by_python
        for base in kind.__mro__
    )


def _of_object(value: Any) -> _Parts:
    """Of an object of a class written in Python: its items, and then its attributes."""
    kind = type(value)
    items: list[Any] = []
    if isinstance(value, dict):
        items = list(dict.values(value))
    elif isinstance(value, list | tuple):
        items = list(value)
    names = tuple(value) if isinstance(value, dict) else len(items)
    place_of = {id(item): k for k, item in enumerate(items) if not is_value(item)}
    attributes = _attributes(value)
    # A dict whose items are attributes too shall hold one object, not two.
    mirrored = {name: place_of[id(v)] for name, v in attributes.items() if id(v) in place_of}
    own = [name for name in attributes if name not in mirrored]

    def build(children: list[Any]) -> Any:
        new = _with_items(value, children[: len(items)])
        places = [*range(len(items), len(children)), *mirrored.values()]
        for name, place in zip((*own, *mirrored), places, strict=True):
            if name in getattr(value, "__dict__", ()):
                new.__dict__[name] = children[place]
            else:
                object.__setattr__(new, name, children[place])
        return new

    keys = (kind, names, tuple(own), tuple(mirrored.items()))
    return keys, [*items, *(attributes[name] for name in own)], build


def _with_items(like: Any, items: list[Any]) -> Any:
    """An object of the same class with these items, and no attributes yet.

    Its class is not asked: it may want arguments, count what is set, or forbid it.
    """
    base: Any = next(base for base in _BASES if isinstance(like, base))
    if base is tuple:
        return tuple.__new__(type(like), items)
    new = base.__new__(type(like))
    if base is list:
        list.extend(new, items)
    elif issubclass(base, dict):
        for key, item in zip(like, items, strict=True):
            base.__setitem__(new, key, item)
    if base is defaultdict:
        new.default_factory = like.default_factory
    return new


def _attributes(value: Any) -> dict[str, Any]:
    """What an object has in its own dictionary and in the slots of its classes."""
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{kind.__name__.lstrip('_')}{slot}" if _is_private(slot) else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _is_data(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if type(value) is dict:
        return all(map(_is_data, value.values()))
    return type(value) in (list, tuple) and all(map(_is_data, value))


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, np.ndarray):
        return () if value.dtype.hasobject else (crc32(np.ascontiguousarray(value).data),)
    if isinstance(value, torch.Generator):
        return (value.get_state().numpy().tobytes(),)
    if isinstance(value, np.random.Generator):
        return (repr(value.bit_generator.state),)
    if isinstance(value, np.random.RandomState):
        return (repr(value.get_state()),)
    if isinstance(value, random.Random):
        return (repr(value.getstate()),)
    inside = list(_attributes(value).values())
    if isinstance(value, dict):
        return [*value.keys(), *value.values(), *inside]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*value, *inside]
    return inside


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (
        isinstance(now, _PLAIN) and type(now) is type(before) and now == before
    )


def versions(values: Iterable[Any]) -> list[int]:
    """How often the tensors among these were changed in place; of inference tensors nobody knows.

    A subclass is not asked, which may have to communicate first.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [v._version for v in values if isinstance(v, Tensor) and not v.is_inference()]
