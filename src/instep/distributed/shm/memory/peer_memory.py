"""The private memory of the other ranks' processes, read directly.

process_vm_readv(2) copies from one process to another ("cross memory attach" in MPI libraries), so
that a large tensor is copied once, not into shared memory and out again. The kernel asks for the
right to trace the other process; containers and Yama (ptrace_scope) may deny it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_LONGEST = 1 << 30
"""Bytes of one call; the kernel copies a little less than 2 GiB."""
_MOST_PIECES = 1024
"""IOV_MAX."""


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
]


class PeerMemory:
    """Reads the memory of processes of this host, by their ranks."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def read(self, rank: int, address: int, target: Tensor) -> None:
        """Overwrite a contiguous tensor with the memory of a rank. Raises OSError."""
        self.read_each(rank, [address], [target])

    def read_each(self, rank: int, addresses: Sequence[int], targets: Sequence[Tensor]) -> None:
        """`read` of each of several tensors, in few system calls. Raises OSError."""
        pieces = [
            (address + start, target.data_ptr() + start, min(_LONGEST, target.nbytes - start))
            for address, target in zip(addresses, targets, strict=True)
            for start in range(0, target.nbytes, _LONGEST)
        ]
        while pieces:
            count = total = 0
            for _, _, length in pieces[:_MOST_PIECES]:
                if count and total + length > _LONGEST:
                    break
                count, total = count + 1, total + length
            self._copy(rank, pieces[:count], total)
            del pieces[:count]

    def _copy(self, rank: int, pieces: Sequence[tuple[int, int, int]], total: int) -> None:
        count = len(pieces)
        theirs = (_Vector * count)(*(_Vector(source, length) for source, _, length in pieces))
        ours = (_Vector * count)(*(_Vector(target, length) for _, target, length in pieces))
        done = _libc.process_vm_readv(self._pids[rank], ours, count, theirs, count, 0)
        if done != total:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number) if done < 0 else "some of it is not mapped")


def allow_siblings() -> None:
    """Let the parent of this process, and all that it has started, read its memory.

    Yama's ptrace_scope 1, the default of some distributions, allows it to ancestors only.
    """
    try:
        restricted = _YAMA.read_text().strip() == "1"
    except OSError:
        return
    if restricted:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def can_read(memory: PeerMemory, addresses: Sequence[int], values: Sequence[int]) -> bool:
    """Whether each rank's int64 at its address can be read, and has that value."""
    found = torch.empty(1, dtype=torch.int64, device="cpu")
    for rank, (address, value) in enumerate(zip(addresses, values, strict=True)):
        try:
            memory.read(rank, address, found)
        except OSError:
            return False
        if found.item() != value:
            return False
    return True
