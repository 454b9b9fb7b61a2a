"""The cores of all ranks of a host, for one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from instep.distributed.communication.transport import Transport


@dataclass(frozen=True)
class Cores:
    """What a process uses of its host."""

    threads: int
    """Of PyTorch's operations."""
    cpus: frozenset[int]
    """As in `os.sched_getaffinity`."""

    @classmethod
    def of_all(cls, threads: int, transport: Transport) -> Cores:
        """Those of all ranks together; `threads`: what this rank would use if it were alone, of
        which rank 0's counts. Collective."""
        mine = threads, os.sched_getaffinity(0)
        by_rank = transport.all_gather_object(mine)
        return cls(by_rank[0][0], frozenset().union(*(cpus for _, cpus in by_rank)))

    def apply(self) -> None:
        """Use them from now on. Where the launcher confines each rank, it keeps its own."""
        with suppress(OSError):
            os.sched_setaffinity(0, self.cpus)
        torch.set_num_threads(self.threads)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use them inside."""
        own = Cores(torch.get_num_threads(), frozenset(os.sched_getaffinity(0)))
        self.apply()
        try:
            yield
        finally:
            own.apply()
