"""Memory of which the CPU ranks of a host have one copy: which ranks can have some, and whether
somebody else uses a tensor's."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import torch
from torch import Tensor

from instep.distributed.communication.transport import Transport
from instep.distributed.errors import SharedMemoryError
from instep.distributed.numbers import on_all_ranks
from instep.distributed.shm.memory.host_memory import HostMemory, numa_nodes
from instep.process import settings
from instep.process.torch_private.tensors import storage_use_count

FEWEST_ELEMENTS = 1 << 20
"""Below, the barriers take longer than what one copy saves."""
MOST_TRIES = 3
"""Of a copy: another tensor of the script may have the memory only for a while."""
MOST_WRITES = 3
"""Steps that may find what the script has written. A page costs it some microseconds; a script
that writes in every step has memory of its own from then on."""
_ALIGNMENT = 64
"""Bytes; that of PyTorch's own tensors."""


def can_share(transport: Transport) -> bool:
    """Whether ranks may have memory in common; the same on all of them."""
    return transport.size > 1 and transport.in_place and str(settings.HOST_COPY) != "off"


def are_near(transport: Transport) -> bool:
    """Whether all ranks run on one NUMA node, or need not: from another one's memory a rank would
    read everything more slowly in every step. Collective."""
    if str(settings.HOST_COPY) == "on":
        return True
    nodes = numa_nodes(os.sched_getaffinity(0))
    node = nodes.pop() if len(nodes) == 1 else -1
    found = torch.tensor([node, -node], dtype=torch.int32, device="cpu")
    transport.all_reduce(found, "max").wait()
    highest, lowest = found.tolist()
    return bool(highest == -lowest and highest >= 0)


def open_one_copy(size: int, transport: Transport) -> HostMemory | None:
    """New memory on all ranks, or None on all of them. Collective."""
    forks.begin()
    try:
        descriptor = transport.open_memory(size)
    except SharedMemoryError:
        return None
    if descriptor is None:
        return None
    memory = None
    with suppress(OSError):  # too little address space, or a kernel that tells nothing of pages
        memory = HostMemory(descriptor)
    return memory if on_all_ranks(memory is not None, transport) else None


def write_to_new_memory(memory: HostMemory, transport: Transport) -> bool:
    """Let what is shared be written to new memory, as a forked child has the old one; False if
    there is none. Collective."""
    try:
        descriptor = transport.open_memory(memory.size)
    except SharedMemoryError:
        return False
    assert descriptor is not None
    memory.write_to(descriptor)
    return True


def size_in_memory(tensor: Tensor) -> int:
    """The bytes from the beginning of a tensor to that of the next one."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def has_other_users(tensor: Tensor, views: int = 0) -> bool:
    """Whether somebody else has the memory of this tensor; `views`: how many of it are known."""
    storage = tensor.untyped_storage()
    is_counted = storage_use_count(storage._cdata) == 2 + views  # the tensor, and `storage`
    return not is_counted or _count_python_references(tensor) != _PYTHON_REFERENCES + 1


def _count_python_references(tensor: Tensor) -> int:
    """References to a tensor's storage, of which there is one Python object at a time."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_PYTHON_REFERENCES = _count_python_references(torch.empty(1, device="cpu"))
"""Of a storage that nobody else has."""


class _ForkCounter:
    """How often this process has forked since it first had such memory."""

    count = 0
    _is_counting = False

    def begin(self) -> None:
        """Count from now on, if it does not yet."""
        if not self._is_counting:
            self._is_counting = True
            os.register_at_fork(after_in_parent=self._add)

    def _add(self) -> None:
        self.count += 1


forks = _ForkCounter()
