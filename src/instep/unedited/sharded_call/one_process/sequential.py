"""Work that each rank does in its turn, with the cores of all ranks of the host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch

from instep.distributed.communication.rank_local import rank_local
from instep.distributed.communication.transport import Transport

T = TypeVar("T")


@dataclass(frozen=True)
class Cores:
    """What a process may use that is alone on its host."""

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


def run_sequential(
    function: Callable[[], T], cores: Cores, transport: Transport
) -> tuple[T, float]:
    """`function()` on one rank after the other, each with these cores. Collective.

    Returns its value, and the seconds for which this rank has waited for others. Raises what
    `function` raises on this rank, after all turns.
    """
    value: list[T] = []
    error: Exception | None = None
    waited = 0.0
    for rank in range(transport.size):
        start = perf_counter()
        if rank == transport.rank:
            try:
                with rank_local(), cores.applied():
                    value.append(function())
            except Exception as raised:
                error = raised
        transport.barrier()
        if rank != transport.rank:
            waited += perf_counter() - start
    if error is not None:
        raise error
    return value[0], waited
