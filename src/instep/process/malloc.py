"""Let freed memory stay with this process, in huge pages.

By default the C library gives the top of its heap back to the system once 128 KiB to 64 MiB of it
are free: the gradients of large layers, in every step, and gets it anew, page by page. That is 8 %
of a step of ResNet-18 on two ranks of one thread, and not on all ranks at the same moment, so that
a rank that waits for the others waits for it twice.

An optimizer or a sum over ranks passes over all parameters and looks up the address of each page;
in pages of 2 MiB instead of 4 KiB a step of SGD takes 0.7 of the time. Where the system gives huge
pages on request (`madvise`, most distributions' setting), this module requests them.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # mallopt(3)
_KEPT_BYTES = 1 << 30
_HUGE_BYTES = 512 << 20
"""How much of the heap is asked for in huge pages: address space, no memory until it is used."""
_LARGEST_IN_HEAP = 32 << 20
"""The most that mallopt takes: a larger piece comes from the system and goes back to it."""
_DEFAULT_MMAP_MAX = 65536
_USER_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)


def keep_freed_memory() -> None:
    """Keep up to 1 GiB from now on, in pieces of up to 32 MiB; the first 512 MiB in huge pages.

    Does nothing where the user has tuned it (MALLOC_TRIM_THRESHOLD_ and so on), or without glibc.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and not any(name in os.environ for name in _USER_VARIABLES):
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        _request_huge_pages(library)


def share_freed_memory() -> None:
    """Let threads that begin from now on allocate from the heap of the first one.

    By default each has a heap of its own, up to eight for each core, which gives freed memory back
    and waits for no other thread. Does nothing without glibc.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and "MALLOC_ARENA_MAX" not in os.environ:
        library.mallopt(_ARENA_MAX, 1)


def release_pages(address: int, length: int) -> None:
    """Give the pages of memory that is about to be freed, and would be kept, back to the system.

    Values in them are lost. Later allocations get new ones, in huge pages where these were such.
    """
    first = address + -address % mmap.PAGESIZE
    pages = (address + length - first) // mmap.PAGESIZE
    if pages > 0:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), mmap.MADV_DONTNEED
        )


def _request_huge_pages(library: ctypes.CDLL) -> None:
    """For the next stretch of the heap, which grows by being used and freed once."""
    library.malloc.restype = ctypes.c_void_p
    library.mallopt(_MMAP_MAX, 0)
    start = library.malloc(ctypes.c_size_t(_HUGE_BYTES))
    library.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
    if start is not None:  # else there is a limit to this process's addresses
        library.free(ctypes.c_void_p(start))
        first = start + -start % mmap.PAGESIZE
        length = ctypes.c_size_t(start + _HUGE_BYTES - first)
        library.madvise(ctypes.c_void_p(first), length, mmap.MADV_HUGEPAGE)
