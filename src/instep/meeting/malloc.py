"""Memory that this process has freed stays with it.

By default the C library gives the top of its heap back to the system once 128 KiB to 64 MiB of it
are free: the gradients of large layers, in every step, and gets it anew, page by page. That is 8 %
of a step of ResNet-18 on two ranks of one thread, and not on all ranks at the same moment, so that
whoever waits for the others waits for it twice.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h; mallopt(3)
_KEPT_BYTES = 512 << 20
_LARGEST_IN_HEAP = 32 << 20
"""The most that mallopt takes: what is larger comes from the system and goes back to it."""
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_what_is_freed() -> None:
    """Up to 512 MiB from now on, in pieces of up to 32 MiB.

    Does nothing where the user has tuned it (MALLOC_TRIM_THRESHOLD_ and so on), or without glibc.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None and not any(name in os.environ for name in _OF_THE_USER):
        tune(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        tune(_TRIM_THRESHOLD, _KEPT_BYTES)
