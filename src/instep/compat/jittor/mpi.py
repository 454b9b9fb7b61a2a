"""`from jittor import mpi`: the numbers of this process, and collectives without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.compat.jittor import ops
from instep.distributed.communication import collectives
from instep.distributed.communication.transport import get_transport, group_rank
from instep.distributed.rendezvous import bootstrap

if TYPE_CHECKING:
    from numpy import ndarray

__all__ = [
    "broadcast",
    "get_state",
    "local_rank",
    "mpi_barrier",
    "ops",
    "var_all_reduce",
    "var_broadcast",
    "var_reduce",
    "world_rank",
    "world_size",
]


def world_size() -> int:
    """The number of processes; 1 inside a single_process_scope."""
    return bootstrap.current().size


def world_rank() -> int:
    """The number of this process in the job; 0 inside a single_process_scope."""
    return bootstrap.current().rank


def local_rank() -> int:
    """The number of this process on its host."""
    return bootstrap.current().local_rank


def get_state() -> bool:
    """Whether ranks communicate: False inside a single_process_scope."""
    return not bootstrap.is_world_of_one()


def __getattr__(name: str) -> Any:
    mend = ""
    if name == "set_state":
        mend = ". In its place: `@jt.single_process_scope()`, in which ranks do not communicate"
    raise AttributeError(f"module 'jittor.mpi' of instep has no attribute {name!r}{mend}.")


def broadcast(array: ndarray, root: int = 0) -> None:
    """Overwrite a numpy array, of any dtype and layout, with root's. Collective.

    Raises ValueError for a root that does not exist.
    """
    array[...] = get_transport().broadcast_object(array, group_rank(root, "root", None))


def var_broadcast(x: Tensor, root: int = 0) -> Tensor:
    """Root's tensor, without a gradient. Collective."""
    with torch.no_grad():
        return ops.mpi_broadcast(x, root)


def var_reduce(x: Tensor, root: int = 0) -> Tensor:
    """The sum at root, zeros elsewhere, without a gradient. Collective."""
    with torch.no_grad():
        return ops.mpi_reduce(x, "add", root)


def var_all_reduce(x: Tensor) -> Tensor:
    """The sum, without a gradient. Collective."""
    with torch.no_grad():
        return ops.mpi_all_reduce(x, "add")


def mpi_barrier() -> None:
    """Return when every rank has called this function."""
    collectives.barrier()
