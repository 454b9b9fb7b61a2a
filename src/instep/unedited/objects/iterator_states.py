"""How far an iterator has come, where that can be told without taking its next value."""

from __future__ import annotations

import gc
import itertools
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import length_hint
from typing import Any

from instep.process.patching import ignored_warnings
from instep.training.pytree import PLAIN
from instep.unedited.objects.inner_values import CALLING_ITERATOR

_MODULES = ("builtins", "itertools")
_COUNTING: tuple[type, ...] = (itertools.cycle, *map(type, itertools.tee((), 1)))
"""They count by themselves which of the values that they keep is the next one."""


def is_iterator(value: Any) -> bool:
    """Whether this is an iterator of Python's own: a generator, a counter, one over a list...
    How far `iter(function, sentinel)` has come is told by what the function leads to."""
    is_own = type(value).__module__ in _MODULES and isinstance(value, Iterator)
    return is_own and not isinstance(value, CALLING_ITERATOR)


def describe_iterator(value: Any) -> str:
    """How far it has come; the same text for two moments if it has stayed where it was."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return "" if frame is None else repr((frame.f_lasti, _of_locals(frame.f_locals)))
    if isinstance(value, itertools.count | itertools.repeat):
        return repr(value)
    left = length_hint(value, -1)
    if left >= 0:
        return str(left)
    # `map` and `zip` have theirs in a tuple, `product` its last value. That of `zip_longest` may
    # have empty places, at which Python's own loop would crash.
    found = [
        each
        for part in _parts_of(value)
        for each in (gc.get_referents(part) if isinstance(part, tuple) else (part,))
    ]
    return repr([describe_iterator(each) if is_iterator(each) else id(each) for each in found])


def _parts_of(value: Any) -> list[Any]:
    """Where it stands: other iterators, its last value, or what tells how far it has come."""
    if isinstance(value, _COUNTING):
        with ignored_warnings("Pickle, copy, and deepcopy support"), suppress(TypeError):
            return list(value.__reduce__()[1:])  # no more from Python 3.14 on
    return gc.get_referents(value)


def _of_locals(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, PLAIN) else id(v) for k, v in values.items()}
