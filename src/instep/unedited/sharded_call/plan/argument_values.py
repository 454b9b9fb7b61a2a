"""What calls of one kind get beside rows: numbers, tensors with one number, sets, ranges, and the
plain values in objects. Where these change, a call may do something else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.training.pytree import PLAIN, attributes_of, is_cache, is_column, is_value
from instep.unedited.objects.number_expressions import NumberChanges
from instep.unedited.sharded_call.plan.argument_expressions import ArgumentExpressions
from instep.unedited.sharded_call.plan.bound_call import BoundCall, is_number
from instep.unedited.sharded_call.plan.division import has_text, is_entries
from instep.unedited.sharded_call.plan.module_state.attribute_changes import is_compared_change
from instep.unedited.sharded_call.plan.module_state.object_graph import FUNCTIONS

_MAX_ATTRIBUTES, _MAX_DEPTH = 64, 3
_MAX_NUMBERS = 64
"""In a tensor or array without rows; larger ones are data."""
_MAX_TEXTS = 16
"""So many values of one that is no number are compared; it may be another one in each call."""
_SETS, _RANGES = (set, frozenset), (range, slice)
_TABLES = frozenset(vars(nn.Module()))
"""Where a module has its parts, parameters and hooks."""
_Key = tuple[int, str]
"""The number of an argument, and an attribute of it, or ""."""


@dataclass(eq=False)
class ArgumentValues:
    """The values beside rows in the arguments of calls with one key."""

    _last: dict[_Key, Any] = field(default_factory=dict)
    _changes: dict[_Key, int] = field(default_factory=dict)
    _sizes: dict[_Key, NumberChanges] = field(default_factory=dict)
    _texts: dict[_Key, set[str]] = field(default_factory=dict)
    _expressions: ArgumentExpressions | None = None
    """Of the forward; None until one of these values has changed."""
    _changed: set[_Key] = field(default_factory=set)
    """Those that have had another value than before."""
    has_first_change: bool = False
    """Whether one of them had another value for the first time in the last call."""
    are_of_objects: bool = False
    """Whether some are in objects of the script's, which may know the time: not the same on all
    ranks."""

    def add(self, call: BoundCall, dims: Sequence[int | None], calls: int) -> bool:
        """Whether a call with these arguments is to be compared; `dims` are the dimensions of the
        rows, and `calls` is the number of this call."""
        values = dict(_values_of(call, dims))
        self.has_first_change = False
        if repr(values) == repr(self._last):
            return False
        before, self._last = self._last, values
        self.are_of_objects |= any(name for _, name in values)
        is_new = [self._add(key, value, before, calls) for key, value in values.items()]
        is_new += [self._has_other(key, None, before, calls) for key in before.keys() - values]
        if not before:
            return any(is_new)
        changed = {key for key in values.keys() & before if values[key] != before[key]}
        self.has_first_change = any(not key[1] and key not in self._changed for key in changed)
        self._changed |= changed
        named = _named(call)
        if self._expressions is None:
            self._expressions = ArgumentExpressions(call.parts, named)
        return self._expressions.have_new_sizes(named) or any(is_new)

    def _add(self, key: _Key, value: Any, before: dict[_Key, Any], calls: int) -> bool:
        is_new = self._has_other(key, value, before, calls)
        if isinstance(value, str):
            texts = self._texts.setdefault(key, set())
            is_new |= value not in texts and len(texts) < _MAX_TEXTS
            texts.add(value)
        elif not isinstance(value, tuple | list):
            is_new |= self._sizes.setdefault(key, NumberChanges()).has_new_size(value)
        return is_new

    def _has_other(self, key: _Key, value: Any, before: dict[_Key, Any], calls: int) -> bool:
        """Whether it has changed in a way that calls for a comparison."""
        is_attribute = bool(key[1])
        if not before or (key not in before and not is_attribute):  # its rows are known by now
            return False
        if repr(before.get(key)) == repr(value):
            return False
        self._changes[key] = self._changes.get(key, 0) + 1
        return is_compared_change(self._changes[key], calls)


def _values_of(call: BoundCall, dims: Sequence[int | None]) -> Iterator[tuple[_Key, Any]]:
    for k, leaf in enumerate(call.leaves):
        has_rows = k < len(dims) and dims[k] is not None
        if is_number(leaf, call.rows) or isinstance(leaf, np.number):
            yield (k, ""), leaf
        elif has_rows or is_value(leaf) or is_entries(leaf) or isinstance(leaf, FUNCTIONS):
            continue
        elif is_column(leaf):
            if dims and not has_text(leaf):
                yield (k, ""), leaf
        elif isinstance(leaf, Tensor | np.ndarray):
            if (number := _number_in(leaf)) is not None:
                yield (k, ""), number
            elif dims and _can_be_read(leaf, _MAX_NUMBERS):
                yield (k, ""), [repr(leaf.tolist())]
        elif isinstance(leaf, _SETS):
            yield (k, ""), str(sorted(map(repr, filter(_is_plain, leaf))))
        elif isinstance(leaf, _RANGES):
            yield (k, ""), str(leaf)
        elif not is_cache(leaf):
            attributes = _attributes(leaf, "", _MAX_DEPTH)
            yield from (((k, name), each) for name, each in islice(attributes, _MAX_ATTRIBUTES))


def _attributes(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The plain values in an object, and in those and the dicts in it, with their paths."""
    if isinstance(value, (Tensor, np.ndarray, type, *FUNCTIONS)) or depth == 0:
        return
    items = value if type(value) is dict else attributes_of(value)
    for name, each in [*items.items()]:
        place = f"{path}.{name}"
        is_flag = isinstance(each, bool) and depth == _MAX_DEPTH  # which calls for another plan
        if isinstance(each, int | float | str) and not is_flag:
            yield place, each
        elif is_column(each):
            yield place, str(each)
        elif not (isinstance(value, nn.Module) and name in _TABLES):
            yield from _attributes(each, place, depth - 1)


def _number_in(leaf: Tensor | np.ndarray[Any, Any]) -> Any:
    """The number in a tensor or array with one, if it can be read; else None."""
    return leaf.item() if _can_be_read(leaf, 1) and math.prod(leaf.shape) == 1 else None


def _can_be_read(leaf: Tensor | np.ndarray[Any, Any], most: int) -> bool:
    """Whether so many numbers of a tensor or array can be read without waiting for a device, and
    are not trained, which changes them in each step."""
    if isinstance(leaf, np.ndarray):
        return leaf.size <= most and not leaf.dtype.hasobject
    is_plain = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
    return is_plain and leaf.is_cpu and leaf.numel() <= most and not leaf.requires_grad


def _named(call: BoundCall) -> dict[str, Any]:
    """The arguments by their names, as far as they are no rows."""
    try:
        bound = inspect.signature(type(call.module).forward).bind(
            call.module, *call.args, **call.kwargs
        )
    except (TypeError, ValueError):  # it will fail
        return {}
    found = dict([*bound.arguments.items()][1:])
    found |= found.pop("kwargs", {})
    numbers = {name: _number_in(x) for name, x in found.items() if isinstance(x, Tensor)}
    found |= numbers
    return {name: value for name, value in found.items() if value is not None}


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN)
