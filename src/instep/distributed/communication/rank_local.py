"""Where ranks do different work: inside a sharded call, and while they load their own rows.

Elsewhere all ranks take the same path. What one rank does for all (a child process, a line of
standard input) is only known to be asked for by all of them there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    value = 0


_depth = _Depth()


@contextmanager
def rank_local() -> Iterator[None]:
    """In here, this thread of this rank may do something else than the other ranks."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def is_rank_local() -> bool:
    """Whether this thread is in there; always so in a process that a rank forked."""
    return is_thread_rank_local() or _rank not in (None, os.getpid())


def is_thread_rank_local() -> bool:
    """Whether this thread is in there, in whichever process."""
    return _depth.value > 0


_rank: int | None = None


def register_rank() -> None:
    """From here on, processes that this one forks are apart."""
    global _rank
    _rank = os.getpid()


def unregister_rank() -> None:
    """And from here on they are not."""
    global _rank
    _rank = None
