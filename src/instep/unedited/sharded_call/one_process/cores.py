"""The cores of all ranks of a host, for one of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from instep.distributed.communication.transport import Transport
from instep.distributed.identity import launchers, torch_devices
from instep.distributed.identity.world import World
from instep.process import settings

_TORCH_CPU = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@dataclass(frozen=True)
class Cores:
    """What a process uses of its host."""

    threads: int
    """Of PyTorch's operations."""
    cpus: frozenset[int]
    """As in `os.sched_getaffinity`."""

    @classmethod
    def of_all(cls, threads: int, transport: Transport) -> Cores:
        """The cores of all ranks together. Collective.

        `threads`: what this rank would use if it were alone; that of rank 0 counts.
        """
        mine = threads, os.sched_getaffinity(0)
        by_rank = transport.all_gather_object(mine)
        return cls(by_rank[0][0], frozenset().union(*(cpus for _, cpus in by_rank)))

    def apply(self) -> None:
        """Use them from now on. Where the launcher confines each rank, it keeps its own."""
        with suppress(OSError):
            os.sched_setaffinity(0, self.cpus)
        _set_threads(self.threads)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use them inside. What the script sets meanwhile, it keeps."""
        own = Cores(torch.get_num_threads(), frozenset(os.sched_getaffinity(0)))
        self.apply()
        given = os.sched_getaffinity(0)
        try:
            yield
        finally:
            if torch.get_num_threads() == self.threads:
                torch.set_num_threads(own.threads)
            if os.sched_getaffinity(0) == given:
                os.sched_setaffinity(0, own.cpus)


def _set_threads(threads: int) -> None:
    """As `torch.set_num_threads`, but MKL may use fewer for small tensors, as at PyTorch's start.

    `torch.set_num_threads` ends that: `torch.tanh` of 2,048 elements took 2.2 us in place of 1.5.
    """
    torch.set_num_threads(threads)
    with suppress(OSError, AttributeError):  # this PyTorch has no MKL
        ctypes.CDLL(str(_TORCH_CPU)).MKL_Set_Dynamic(1)


def can_use_one_process(world: World) -> bool:
    """Whether rank 0 may turn out to take less time alone: where one process can use the cores of
    all ranks, and what the script does may be decided by time."""
    return (
        world.one_host
        and settings.divides_by_time()
        and not str(settings.CHECKPOINT)
        and torch_devices.own_device().type == "cpu"
    )


def threads_of_one_process(world: World) -> int:
    """The threads of PyTorch's operations that this process would use alone on its host."""
    threads = torch.get_num_threads()
    if launchers.HOST_CORES in os.environ:
        return int(os.environ[launchers.HOST_CORES])
    if "OMP_NUM_THREADS" in os.environ and not launchers.has_chosen_threads(os.environ):
        return threads
    return min(threads * world.size, os.cpu_count() or 1)
