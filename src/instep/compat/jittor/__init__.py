"""Jittor's names for scripts on several processes, for PyTorch tensors, under any launcher.

    import instep.jittor as jt    # or, under `instep run`, import jittor as jt
    from instep.compat.jittor import mpi

Each has Jittor's name, meaning and gradient, except for the errors of Jittor that
docs/coming-from.md lists. `in_mpi`, `rank`, `world_size` and `world_rank` are looked up at each
use, so they are right inside a single_process_scope too. `world_rank` is the number of processes,
as in Jittor's documentation; `mpi.world_rank()` is the rank, as in its code.
"""

from __future__ import annotations

import random as _random
from typing import TYPE_CHECKING, Any

import torch as _torch
from torch import nn as _nn

from instep.compat.jittor import compile_extern, dataset, mpi, optim
from instep.compat.jittor.ops import mpi_all_reduce, mpi_broadcast, mpi_reduce
from instep.distributed.communication.collectives import broadcast_coalesced
from instep.distributed.communication.scopes import single_process_scope
from instep.distributed.identity import torch_devices
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
    "compile_extern",
    "dataset",
    "in_mpi",
    "mpi",
    "mpi_all_reduce",
    "mpi_broadcast",
    "mpi_param_broadcast",
    "mpi_reduce",
    "optim",
    "rank",
    "set_global_seed",
    "single_process_scope",
    "sync_all",
    "world_rank",
    "world_size",
]

_WORLD_ATTRIBUTES = {
    "in_mpi": "parallel",
    "rank": "rank",
    "world_rank": "size",
    "world_size": "size",
}

_IN_ITS_PLACE = {
    "Function": "torch.autograd.Function",
    "Module": "torch.nn.Module",
    "Var": "torch.Tensor",
    "array": "torch.tensor",
    "concat": "torch.cat",
    "flags": "tensor.to(device) and model.to(device)",
    "float32": "torch.tensor(..., dtype=torch.float32)",
    "grad": "torch.autograd.grad",
    "init": "torch.nn.init",
    "int32": "torch.tensor(..., dtype=torch.int32)",
    "load": "torch.load",
    "local_rank": "mpi.local_rank()",
    "lr_scheduler": "torch.optim.lr_scheduler",
    "models": "torchvision.models",
    "nn": "torch.nn, and jt.optim for the optimizers",
    "no_grad": "torch.no_grad",
    "ones": "torch.ones",
    "rand": "torch.rand",
    "randn": "torch.randn",
    "random": "torch.rand",
    "save": "torch.save",
    "transform": "torchvision.transforms",
    "zeros": "torch.zeros",
}
"""Of Jittor's names that are not here: what scripts call. Tensors and models are PyTorch's."""


def __getattr__(name: str) -> Any:
    if name in _WORLD_ATTRIBUTES:
        return getattr(bootstrap.current(), _WORLD_ATTRIBUTES[name])
    raise AttributeError(
        f"module 'jittor' of instep has no attribute {name!r}. It has what scripts need on several "
        f"processes; in its place: {_IN_ITS_PLACE.get(name, 'the function of torch')}."
    )


def sync_all(device_sync: bool = False) -> None:
    """Wait until this process's accelerator, if it is in use, has done its work. No rank waits for
    another one, as in Jittor: that is `mpi.mpi_barrier()`."""
    if torch_devices.is_in_use():
        _torch.accelerator.synchronize()


def mpi_param_broadcast(module: _nn.Module, root: int = 0) -> None:
    """Overwrite the parameters of `module` (not its buffers) with root's. Collective."""
    broadcast_coalesced(list(module.parameters()), root)


def set_global_seed(seed: int, different_seed_for_mpi: bool = True) -> None:
    """Seed random, numpy and torch, with `seed` itself or with a different seed on each rank.

    `instep.shard` and `instep.replicate` use the random streams of one process in both cases.
    """
    if different_seed_for_mpi:
        seed += 2591 * bootstrap.current().rank
    _random.seed(seed)
    _torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


def add_methods() -> None:
    """Add the methods `mpi_all_reduce`, `mpi_reduce` and `mpi_broadcast` to tensors, and
    `mpi_param_broadcast` to modules. Changes torch's classes, for the whole process."""
    for function in (mpi_all_reduce, mpi_reduce, mpi_broadcast):
        setattr(_torch.Tensor, function.__name__, function)
    setattr(_nn.Module, mpi_param_broadcast.__name__, mpi_param_broadcast)
