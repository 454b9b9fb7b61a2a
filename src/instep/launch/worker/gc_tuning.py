"""Importing torch makes 170,000 objects that stay: the garbage collector need not look at them.

It would while they are made, in every full collection of a training, and several times when the
interpreter ends: of the 1.6 s in which a process imports torch and ends, that is 0.45 s.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from instep.process.import_hooks import during_import


def freeze_torch_objects() -> None:
    """Import torch, whenever that will be, without collections, and make permanent what is there.

    Not where a file is open for writing by then: if it is in a cycle, only a collection as the
    interpreter ends writes the rest of it.
    """
    during_import("torch", _without_collections)


@contextmanager
def _without_collections() -> Iterator[None]:
    may_be_permanent = not any(map(_is_open_for_writing, gc.get_objects()))
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
    if may_be_permanent:
        gc.freeze()


def _is_open_for_writing(thing: object) -> bool:
    """Whether it is an open file, but for the standard streams."""
    if not isinstance(thing, io.BufferedWriter | io.BufferedRandom):
        return False
    with suppress(ValueError):  # it is detached, or there is no file beneath it
        return not thing.closed and thing.fileno() > 2
    return False
