"""What is in objects that show no attributes: a proxy of a dict, a queue, a csv writer."""

from __future__ import annotations

import csv
import gc
import io
import threading
import types
from contextlib import suppress
from queue import SimpleQueue
from typing import Any
from weakref import KeyedRef, WeakKeyDictionary, WeakSet, WeakValueDictionary

_WITH_NAMESPACE = (threading.local, WeakKeyDictionary, WeakValueDictionary, WeakSet)
CSV_WRITER = type(csv.writer(io.StringIO()))
CALLING_ITERATOR = type(iter(int, 1))
"""What `iter(function, sentinel)` returns."""
WITH_INNER_VALUES = (
    *(types.MappingProxyType, SimpleQueue, KeyedRef, *_WITH_NAMESPACE),
    *(CSV_WRITER, CALLING_ITERATOR, memoryview),
)


def inner_values(value: Any) -> list[Any]:
    """What is in one of `WITH_INNER_VALUES`."""
    if isinstance(value, KeyedRef):
        return [value()]
    if isinstance(value, _WITH_NAMESPACE):
        return [vars(value)]
    if isinstance(value, memoryview):
        with suppress(ValueError):  # released
            return [value.obj]
    parts = gc.get_referents(value)
    if isinstance(value, CSV_WRITER):  # it has the file's method `write` alone
        return [getattr(part, "__self__", None) for part in parts]
    if isinstance(value, SimpleQueue):  # of some versions of Python in a list
        return [each for part in parts for each in (part if isinstance(part, list) else (part,))]
    return parts
