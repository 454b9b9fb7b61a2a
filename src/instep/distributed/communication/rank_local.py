"""Rank-local sections, in which ranks do different work: sharded calls, and the loading of rows.

Elsewhere all ranks take the same path. So only there an operation that rank 0 does for all ranks
(a child process, a line of standard input) is certain to be requested by all of them.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from instep.process.process_value import ProcessValue


class _Depth(threading.local):
    """In how many rank-local sections each thread is."""

    value = 0

    def __enter__(self) -> None:
        self.value += 1

    def __exit__(self, *_: object) -> None:
        self.value -= 1


_depth = _Depth()


def rank_local() -> AbstractContextManager[None]:
    """Inside, this thread may do different work than the other ranks."""
    return _depth


def is_rank_local() -> bool:
    """Whether this thread is in a rank-local section, or in a process that a rank forked."""
    return is_thread_rank_local() or is_forked()


def is_thread_rank_local() -> bool:
    """Whether this thread is in a rank-local section."""
    return _depth.value > 0


def is_forked() -> bool:
    """Whether this is a process that a rank has forked."""
    return _process_of_rank.value not in (None, os.getpid())


_process_of_rank = ProcessValue[int | None](None)
"""Its id."""


def register_rank() -> None:
    """From now on the processes that this one forks are rank-local."""
    _process_of_rank.value = os.getpid()


def unregister_rank() -> None:
    """End of `register_rank`."""
    _process_of_rank.value = None
