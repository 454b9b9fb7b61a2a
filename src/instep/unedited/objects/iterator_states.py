"""How far an iterator has come, where that can be told without taking its next value."""

from __future__ import annotations

import gc
import itertools
import types
from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import Any

from instep.process.patching import ignored_warnings
from instep.training.pytree import PLAIN

_MODULES = ("builtins", "itertools")


def is_iterator(value: Any) -> bool:
    """Whether this is an iterator of Python's own: a generator, a counter, one over a list..."""
    return type(value).__module__ in _MODULES and isinstance(value, Iterator)


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
    parts = (
        _parts_of_cycle(value) if isinstance(value, itertools.cycle) else gc.get_referents(value)
    )
    # `map` and `zip` have theirs in a tuple.
    found = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    return repr([describe_iterator(each) for each in found if is_iterator(each)])


def _parts_of_cycle(value: Any) -> list[Any]:
    """What goes through its values now; after the first round it does so by itself."""
    with ignored_warnings("Pickle, copy, and deepcopy support"):
        try:
            return list(value.__reduce__()[1])
        except TypeError:  # from Python 3.14 on
            return gc.get_referents(value)


def _of_locals(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, PLAIN) else id(v) for k, v in values.items()}
