"""Collectives that raise an error for a while: where this rank must not wait for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NoReturn

import torch.distributed as dist

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
"""Methods of a process group that torch.distributed calls, in this version of torch or another, and
those that instep calls directly."""


def forbid_collectives(make_error: Callable[[str], Exception]) -> PatchHandle:
    """Until its end, let these methods raise `make_error(name)`."""
    return PatchHandle(
        Patch(cls, name, _raiser(name, make_error))
        for cls, name in product(_subclasses(dist.ProcessGroup), _COLLECTIVES)
        if name in vars(cls)
    )


def _subclasses(cls: type[object]) -> Iterator[type[object]]:
    """A class and all its subclasses: a backend may bring a process group of its own."""
    yield cls
    direct: list[type[object]] = cls.__subclasses__()
    for subclass in direct:
        yield from _subclasses(subclass)


def _raiser(name: str, make_error: Callable[[str], Exception]) -> Callable[..., NoReturn]:
    def raise_error(*_: object, **__: object) -> NoReturn:
        raise make_error(name)

    return raise_error
