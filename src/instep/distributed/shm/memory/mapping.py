"""Memory that only the ranks of one host share.

It is a memfd. It has no name in the file system, so there is nothing to unlink, nothing is left
after a SIGKILL at any moment, and a small /dev/shm does not matter. The ranks open it through
/proc/<pid>/fd of the rank that made it, which the kernel grants to processes of the same user only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class SharedMemory:
    """The address of a memfd for other processes, while the process that made it holds it open."""

    pid: int
    """The process that made it."""
    descriptor: int
    """Its file descriptor in that process."""


def round_up(size: int, unit: int = PAGE) -> int:
    """The next multiple of `unit` bytes."""
    return -(-size // unit) * unit


@contextmanager
def create_memory(size: int) -> Iterator[SharedMemory]:
    """`size` bytes of zeros with mode 0600, all allocated now; open until the block ends.

    Raises OSError if there is too little memory; later it would be SIGBUS at the first access.
    """
    descriptor = open_memory(size)
    try:
        yield SharedMemory(os.getpid(), descriptor)
    finally:
        os.close(descriptor)


def open_memory(size: int, prepare: Callable[[int], None] | None = None) -> int:
    """The descriptor of memory as of `create_memory`; `prepare` gets it before it has pages."""
    descriptor = os.memfd_create("instep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        if prepare is not None:
            prepare(descriptor)
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_memory(shared: SharedMemory, size: int) -> Tensor:
    """The memory as a uint8 tensor; unmapped when the last tensor on it is deleted.

    Raises OSError if this process may not open it.
    """
    descriptor = os.open(f"/proc/{shared.pid}/fd/{shared.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # Not mmap.mmap: it would keep a descriptor open as long as the memory is mapped.
        return torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8
        )
    finally:
        os.close(descriptor)
