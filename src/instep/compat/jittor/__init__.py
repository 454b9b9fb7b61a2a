"""Jittor's MPI functions, for PyTorch tensors, under any launcher.

    from instep.compat import jittor as jt
    from instep.compat.jittor import mpi

Each has Jittor's name, meaning and gradient, except for the errors of Jittor that
docs/coming-from.md lists. `in_mpi`, `rank`, `world_size` and `world_rank` are looked up at each
use, so they are right inside a single_process_scope too. `world_rank` is the number of processes,
as in Jittor's documentation; `mpi.world_rank()` is the rank, as in its code.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from instep.compat.jittor import mpi
from instep.compat.jittor.ops import mpi_all_reduce, mpi_broadcast, mpi_reduce
from instep.distributed.communication.collectives import broadcast_coalesced
from instep.distributed.communication.scopes import single_process_scope
from instep.distributed.rendezvous import bootstrap

if TYPE_CHECKING:
    in_mpi: bool
    """Whether the job has several processes."""
    rank: int
    """The number of this process in the job."""
    world_size: int
    """The number of processes."""
    world_rank: int
    """The number of processes."""

__all__ = [
    "add_methods",
    "in_mpi",
    "mpi",
    "mpi_all_reduce",
    "mpi_broadcast",
    "mpi_param_broadcast",
    "mpi_reduce",
    "rank",
    "set_global_seed",
    "single_process_scope",
    "world_rank",
    "world_size",
]

_WORLD_ATTRIBUTES = {
    "in_mpi": "parallel",
    "rank": "rank",
    "world_rank": "size",
    "world_size": "size",
}


def __getattr__(name: str) -> Any:
    if name in _WORLD_ATTRIBUTES:
        return getattr(bootstrap.current(), _WORLD_ATTRIBUTES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def mpi_param_broadcast(module: nn.Module, root: int = 0) -> None:
    """Overwrite the parameters of `module` (not its buffers) with root's. Collective."""
    broadcast_coalesced(list(module.parameters()), root)


def set_global_seed(seed: int, different_seed_for_mpi: bool = True) -> None:
    """Seed random, numpy and torch, with `seed` itself or with a different seed on each rank.

    `instep.shard` and `instep.replicate` use the random streams of one process in both cases.
    """
    if different_seed_for_mpi:
        seed += 2591 * bootstrap.current().rank
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


def add_methods() -> None:
    """Add the methods `mpi_all_reduce`, `mpi_reduce` and `mpi_broadcast` to tensors, and
    `mpi_param_broadcast` to modules. Changes torch's classes, for the whole process."""
    for function in (mpi_all_reduce, mpi_reduce, mpi_broadcast):
        setattr(torch.Tensor, function.__name__, function)
    setattr(nn.Module, mpi_param_broadcast.__name__, mpi_param_broadcast)
