"""No collective of torch's where there is nobody to talk to, and whose line it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import NoReturn

import torch.distributed as dist

from instep.distributed.communication.errors import InsideScopeError
from instep.distributed.watchdog.stack_inspection import line, of_script

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


@contextmanager
def no_collectives(rank: int, scope: str) -> Iterator[None]:
    """Let what torch calls on a process group raise InsideScopeError."""
    with ExitStack() as stack:
        for kind, name in product(_kinds(dist.ProcessGroup), _COLLECTIVES):
            if name in vars(kind):
                stack.enter_context(replaced(kind, name, _refusal(name, rank, scope)))
        yield


def _kinds(kind: type[object]) -> Iterator[type[object]]:
    """A class and all that inherit from it: a backend may bring a process group of its own."""
    yield kind
    heirs: list[type[object]] = kind.__subclasses__()
    for heir in heirs:
        yield from _kinds(heir)


def _refusal(name: str, rank: int, scope: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise InsideScopeError(name, line_of_script(), rank, scope)

    return refuse


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Let `owner.name` be `value` for a while."""
    before = vars(owner)[name]  # not getattr: it would bind what torch keeps unbound
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def line_of_script() -> str:
    """Where in the script this is: the innermost frame that is neither instep's nor torch's."""
    return line(of_script(sys._getframe(1)))
