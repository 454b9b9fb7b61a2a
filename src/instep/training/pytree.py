"""Nested values: tuples, lists, dicts, what torch.utils._pytree knows, and beyond that dataclasses,
attrs classes, SimpleNamespace, subclasses of list, tuple, dict, UserDict and UserList, the caches
that language models of transformers return, and torch's distributions.

Other objects are leaves: a copy of them may lack what their class keeps elsewhere.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from itertools import repeat
from typing import Any, Generic
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from instep.distributed.generator_states import describe_state, is_generator
from instep.process.torch_private.dispatch import DisableTorchFunctionSubclass
from instep.process.torch_private.tensors import tree_flatten, tree_unflatten

MAX_OBJECTS = 4096
"""How many objects `contents` visits at most, the nearest first."""

PLAIN = (str, bytes, bool, int, float, complex, type(None))
"""Types of values that nobody can change."""
SEQUENCES = (list, tuple, deque, set, frozenset)
_BASES = (OrderedDict, defaultdict, dict, list, tuple, types.SimpleNamespace, object)
_VALUES = (*PLAIN, enum.Enum, torch.dtype, torch.device, torch.layout, torch.Size)
_ONE_LEAF = "one leaf"
_NO_CONTENTS = (*_VALUES, Tensor, nn.Module, type, types.FunctionType, types.ModuleType)


@dataclass(frozen=True, slots=True)
class Node:
    """A nested value without its leaves. Among the children, a leaf is None."""

    type: type
    """Of a named tuple `tuple`: a forward may make its class anew each time."""
    keys: Any
    """How values of this type with equal children can differ."""
    children: tuple[Node | None, ...]
    build: Callable[[list[Any]], Any] = field(compare=False)
    """Makes a value of this type from its children."""


Structure = Node | None


def flatten(value: Any, like: Structure = None) -> tuple[list[Any], Structure]:
    """The leaves of a nested value, and its structure.

    A list or tuple of plain values (strings, numbers) is one leaf: see `is_column`. So is one that
    is one leaf of `like` (see `one_leaf`).
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, (), like=like)


def flatten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Structure]:
    """`flatten` for a call's arguments; their structure builds the pair (args, kwargs).

    A cache is one leaf: the call changes it. So is what `is_leaf` says.
    """
    leaves: list[Any] = []
    is_one = is_cache if is_leaf is None else lambda value: is_cache(value) or is_leaf(value)
    places = [_flatten(value, leaves, (), is_leaf=is_one) for value in (*args, *kwargs.values())]
    count, names = len(args), tuple(kwargs)

    def build(values: list[Any]) -> Any:
        return tuple(values[:count]), dict(zip(names, values[count:], strict=True))

    return leaves, Node(tuple, (count, names), tuple(places), build)


def one_leaf(kind: type) -> Node:
    """The structure of a list or tuple of this type that is one leaf, whatever is in it."""
    return Node(kind, _ONE_LEAF, (None,), lambda children: children[0])


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    """A new value of this structure with these leaves."""
    return _unflatten(iter(leaves), structure)


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a nested value."""
    return flatten(value)[0]


def is_cache(value: Any) -> bool:
    """Whether this is a cache of transformers: the keys and values, or the states, of the tokens
    that a language model has seen. The model returns it, and changes it where it is an argument.
    """
    return _is_cache_class(type(value))


def leaves_in_caches(structure: Structure) -> list[bool]:
    """For each leaf, whether it is in a cache."""
    if structure is None:
        return [False]
    found = [inside for child in structure.children for inside in leaves_in_caches(child)]
    return [True] * len(found) if _is_cache_class(structure.type) else found


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

    Looks into containers and the attributes of objects, but not into tensors and modules. For a
    generator its state is returned, for an array a checksum of its bytes.
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
            if isinstance(inner, PLAIN):
                found.append(inner)
            elif id(inner) not in known:
                known.add(id(inner))
                waiting.append(inner)
    return found


class ValueSnapshot:
    """The contents of a value now, to be compared with its contents later."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._found = contents(value)
        self._versions = versions(self._found)

    def is_current(self) -> bool:
        """Whether the value still contains the same objects, and its tensors the same numbers."""
        now = contents(self._value)
        return (
            len(now) == len(self._found)
            and all(map(_is_same, now, self._found))
            and versions(now) == self._versions
        )


def _flatten(
    value: Any,
    leaves: list[Any],
    above: tuple[int, ...],
    is_leaf: Callable[[Any], bool] | None = None,
    like: Structure = None,
) -> Structure:
    if like is not None and like.keys == _ONE_LEAF and like.type is type(value):
        leaves.append(value)
        return like
    if isinstance(value, Tensor) or is_value(value) or id(value) in above or is_column(value):
        leaves.append(value)
        return None
    parts = None if is_leaf is not None and is_leaf(value) else _parts(value)
    if parts is None:
        leaves.append(value)
        return None
    keys, children, build = parts
    above = (*above, id(value))
    likes = like.children if like and len(like.children) == len(children) else repeat(None)
    inside = tuple(
        _flatten(child, leaves, above, is_leaf, its_like)
        for child, its_like in zip(children, likes, strict=False)
    )
    return Node(tuple if _is_named_tuple(type(value)) else type(value), keys, inside, build)


def _unflatten(leaves: Iterator[Any], structure: Structure) -> Any:
    if structure is None:
        return next(leaves)
    return structure.build([_unflatten(leaves, child) for child in structure.children])


_Parts = tuple[Any, list[Any], Callable[[list[Any]], Any]]


def _parts(value: Any) -> _Parts | None:
    """The keys and children of a container, and a function that builds one; None for a leaf."""
    cls = type(value)
    if cls in (list, tuple):
        return len(value), list(value), cls
    if cls is dict:
        names = tuple(value)
        return names, list(value.values()), lambda new: dict(zip(names, new, strict=True))
    if _is_named_tuple(cls):
        return (cls.__module__, cls.__qualname__, cls._fields), list(value), cls._make
    if _is_cache_class(cls):  # before torch: some versions register them, and change them so
        return None if _has_hidden_state(cls) else _object_parts(value)
    if isinstance(value, Distribution | Transform) and not isinstance(value, nn.Module):
        return _distribution_parts(value)
    children, spec = tree_flatten(value, is_leaf=lambda node: node is not value)
    if not spec.is_leaf():
        return spec, children, lambda new: tree_unflatten(new, spec)
    return _object_parts(value) if _is_container(cls) else None


def _is_named_tuple(cls: Any) -> bool:
    """Whether `collections.namedtuple` or `typing.NamedTuple` has made this class."""
    return cls.__bases__ == (tuple,) and hasattr(cls, "_fields") and hasattr(cls, "_make")


def _is_cache_class(cls: type) -> bool:
    return any(
        base.__module__.startswith("transformers.")
        and ("Cache" in base.__name__ or base.__module__ == "transformers.cache_utils")
        for base in cls.__mro__
    ) and not issubclass(cls, nn.Module)


def _is_container(cls: type) -> bool:
    if issubclass(cls, nn.Module) or _has_hidden_state(cls):
        return False
    return (
        is_dataclass(cls)
        or hasattr(cls, "__attrs_attrs__")
        or issubclass(cls, types.SimpleNamespace | dict | list | tuple | UserDict | UserList)
    )


def _has_hidden_state(cls: type) -> bool:
    """Whether a base class is written in C, so that its state cannot be seen from Python."""
    made_by_python = 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return any(
        base not in (*_BASES, Generic) and not base.__flags__ & made_by_python
        for base in cls.__mro__
    )


def _object_parts(value: Any) -> _Parts:
    """As `_parts`, for an object of a class written in Python: its items, then its attributes."""
    cls = type(value)
    items: list[Any] = []
    if isinstance(value, dict):
        items = list(dict.values(value))
    elif isinstance(value, list | tuple):
        items = items_of(value)
    names = tuple(value) if isinstance(value, dict) else len(items)
    place_of = {id(item): k for k, item in enumerate(items) if not is_value(item)}
    attributes = attributes_of(value)
    # A dict whose items are attributes too must hold one object for both, not two.
    mirrored = {name: place_of[id(v)] for name, v in attributes.items() if id(v) in place_of}
    own = [name for name in attributes if name not in mirrored]

    def build(children: list[Any]) -> Any:
        new = _copy_items(value, children[: len(items)])
        places = [*range(len(items), len(children)), *mirrored.values()]
        for name, place in zip((*own, *mirrored), places, strict=True):
            if name in getattr(value, "__dict__", ()):
                new.__dict__[name] = children[place]
            else:
                object.__setattr__(new, name, children[place])
        return new

    keys = (cls, names, tuple(own), tuple(mirrored.items()))
    return keys, [*items, *(attributes[name] for name in own)], build


def _distribution_parts(value: Distribution | Transform) -> _Parts:
    """As `_parts`: the attributes, of which several may be one object. The shape of the batch
    follows from those that begin with it."""
    cls, attributes = type(value), attributes_of(value)
    shape = attributes.get("_batch_shape", ())
    like_batch = tuple(_begin_with(attributes, shape))
    if like_batch:
        attributes.pop("_batch_shape", None)
    unique = list({id(each): each for each in attributes.values()}.values())
    place_of = {id(each): k for k, each in enumerate(unique)}
    places = {name: place_of[id(each)] for name, each in attributes.items()}

    def build(children: list[Any]) -> Any:
        new = object.__new__(cls)
        new.__dict__.update((name, children[place]) for name, place in places.items())
        if like_batch:
            new.__dict__["_batch_shape"] = _shape_of(new.__dict__[like_batch[0]])[: len(shape)]
        return new

    return (cls, tuple(places.items()), like_batch), unique, build


def _begin_with(attributes: dict[str, Any], shape: torch.Size) -> Iterator[str]:
    """The names of the tensors and distributions among these whose shape begins so."""
    for name, value in attributes.items():
        if isinstance(value, Tensor | Distribution) and _shape_of(value)[: len(shape)] == shape:
            yield name


def _shape_of(value: Tensor | Distribution) -> torch.Size:
    return value.shape if isinstance(value, Tensor) else value.batch_shape


def _copy_items(like: Any, items: list[Any]) -> Any:
    """An object of the same class with these items, and no attributes yet.

    The class's own methods are not called: they may need arguments, count or forbid changes.
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


def items_of(value: Any) -> list[Any]:
    """What a list, tuple, deque or set holds, whatever its class makes of `len` and `iter`."""
    kind = next(each for each in SEQUENCES if isinstance(value, each))
    return [*kind.__iter__(value)]


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes in an object's dictionary and in the slots of its classes."""
    found = dict(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if _is_private(slot) else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _is_data(value: Any) -> bool:
    if isinstance(value, PLAIN):
        return True
    if type(value) is dict:
        return all(map(_is_data, value.values()))
    return type(value) in (list, tuple) and all(map(_is_data, value))


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, np.ndarray):
        return () if value.dtype.hasobject else (crc32(np.ascontiguousarray(value).data),)
    if is_generator(value):
        return (describe_state(value),)
    inside = list(attributes_of(value).values())
    if isinstance(value, dict):
        return [*value.keys(), *value.values(), *inside]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*items_of(value), *inside]
    return inside


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, PLAIN) and type(now) is type(before) and now == before)


def versions(values: Iterable[Any]) -> list[int]:
    """How often the tensors among these were changed in place; inference tensors do not count it.

    Methods of subclasses are not called: they may have to communicate first.
    """
    with DisableTorchFunctionSubclass():
        return [v._version for v in values if isinstance(v, Tensor) and not v.is_inference()]
