"""Jittor's MPI functions, for PyTorch tensors, under any launcher.

    from instep.compat import jittor as jt
    from instep.compat.jittor import mpi

Each has Jittor's name, meaning and gradient; where Jittor is wrong (docs/coming-from.md says
where), these are right. `in_mpi`, `rank`, `world_size` and `world_rank` are right whenever they are
asked for, inside a single_process_scope too. `world_rank` is the number of processes, as in
Jittor's documentation; `mpi.world_rank()` is the rank, as in its code.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from instep.compat.jittor import mpi
from instep.compat.jittor.ops import mpi_all_reduce, mpi_broadcast, mpi_reduce
from instep.distributed.communication.scopes import single_process_scope
from instep.distributed.communication.transport import broadcast_coalesced
from instep.distributed.rendezvous import bootstrap

if TYPE_CHECKING:
    in_mpi: bool
    """Whether there are several processes."""
    rank: int
    """Which of them this is."""
    world_size: int
    """How many there are."""
    world_rank: int
    """How many there are."""

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

_OF_THE_WORLD = {
    "in_mpi": "parallel",
    "rank": "rank",
    "world_rank": "size",
    "world_size": "size",
}


def __getattr__(name: str) -> Any:
    if name in _OF_THE_WORLD:
        return getattr(bootstrap.current(), _OF_THE_WORLD[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def mpi_param_broadcast(module: nn.Module, root: int = 0) -> None:
    """Overwrite the parameters of `module` (not its buffers) with root's. Collective."""
    broadcast_coalesced(list(module.parameters()), root)


def set_global_seed(seed: int, different_seed_for_mpi: bool = True) -> None:
    """Seed random, numpy and torch: with `seed`, or with another seed on each rank.

    `instep.shard` and `instep.replicate` have the streams of one process either way.
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
    """Let tensors have `mpi_all_reduce`, `mpi_reduce` and `mpi_broadcast`, and modules
    `mpi_param_broadcast`, as methods. Changes torch's classes, for the whole process."""
    for function in (mpi_all_reduce, mpi_reduce, mpi_broadcast):
        setattr(torch.Tensor, function.__name__, function)
    setattr(nn.Module, mpi_param_broadcast.__name__, mpi_param_broadcast)
