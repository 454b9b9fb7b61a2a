"""No collective of torch's where there is nobody to talk to, and whose line it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import NoReturn

import torch.distributed as dist

from instep.distributed.communication.errors import InsideScopeError
from instep.distributed.watchdog.stack_inspection import line, of_script
from instep.process.patching import Patch, PatchHandle

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource"),
    *("all_reduce_now", "all_gather_now"),
)
"""What torch's functions call on a process group, in this version of torch or another, and what
instep's do past them."""


def no_collectives(rank: int, scope: str) -> PatchHandle:
    """Until its end, let what torch calls on a process group raise InsideScopeError."""
    return PatchHandle(
        Patch(owner, name, _refusal(name, rank, scope))
        for owner, name in product(_subclasses(dist.ProcessGroup), _COLLECTIVES)
        if name in vars(owner)
    )


def _subclasses(owner: type[object]) -> Iterator[type[object]]:
    """A class and all that inherit from it: a backend may bring a process group of its own."""
    yield owner
    heirs: list[type[object]] = owner.__subclasses__()
    for heir in heirs:
        yield from _subclasses(heir)


def _refusal(name: str, rank: int, scope: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise InsideScopeError(name, line_of_script(), rank, scope)

    return refuse


def line_of_script() -> str:
    """Where in the script this is: the innermost frame that is neither instep's nor torch's."""
    return line(of_script(sys._getframe(1)))
