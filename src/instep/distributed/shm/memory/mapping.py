"""Memory that all ranks of one host see and nobody else does.

It is a memfd: it has no name in the file system, so there is nothing to unlink, nothing is left
after a SIGKILL at any moment, and a small /dev/shm does not matter. The ranks reach it through
/proc/<pid>/fd of the rank that made it, which the kernel grants to processes of the same user only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Place:
    """Where another process finds the memory, while its maker holds it open."""

    pid: int
    """The maker."""
    descriptor: int
    """Its file descriptor of the memory."""


def round_up(size: int, unit: int = PAGE) -> int:
    """The next multiple of `unit` bytes."""
    return -(-size // unit) * unit


@contextmanager
def new_memory(size: int) -> Iterator[Place]:
    """`size` bytes of zeros with mode 0600, all taken now; open until the block ends.

    Raises OSError if there is not so much memory; better here than SIGBUS at the first touch.
    """
    descriptor = os.memfd_create("instep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield Place(os.getpid(), descriptor)
    finally:
        os.close(descriptor)


def map_memory(place: Place, size: int) -> Tensor:
    """The memory at `place` as a uint8 tensor; unmapped when the last tensor on it is gone.

    Raises OSError if this process may not open it.
    """
    descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # Not mmap.mmap: it would keep a descriptor open as long as the memory is mapped.
        return torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8
        )
    finally:
        os.close(descriptor)
