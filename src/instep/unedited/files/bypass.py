"""Code in `with bypass_overlay():` sees and changes the files that are really there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _BypassDepth(threading.local):
    value = 0


_depth = _BypassDepth()


@contextmanager
def bypass_overlay() -> Iterator[None]:
    """Let this thread's file calls act on the real files, as without instep. Also a decorator."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def is_bypassed() -> bool:
    """Whether this thread is inside `bypass_overlay`."""
    return _depth.value > 0
