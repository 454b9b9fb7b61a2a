"""instep: write for one process, run on many, get the same numbers.

    import instep

    model = instep.replicate(model)   # same parameters everywhere; the global batch's gradient
    loader = instep.shard(loader)     # this rank's block of every batch

and start it with `instep run -n 4 train.py`. Names are resolved when they are used, so that
importing instep costs nothing and `instep.rank` is always the current one.

`rank` is the number of this process, from 0, `world_size` the number of processes, and `local_rank`
the number of this process on its host; `world` has these and more. `is_main_process` is whether
`rank` is 0, `in_mpi` whether there are several processes. `print` is Python's, on rank 0 alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instep.version import __version__ as __version__

if TYPE_CHECKING:
    from instep.distributed.communication.collectives import (
        all_reduce,
        barrier,
        broadcast,
        reduce,
        reduce_scatter,
    )
    from instep.distributed.communication.exchanges import all_gather, all_to_all, gather, scatter
    from instep.distributed.communication.groups import Group, group
    from instep.distributed.communication.objects import (
        all_gather_object,
        broadcast_object,
        gather_object,
    )
    from instep.distributed.communication.point_to_point import recv, send
    from instep.distributed.communication.scopes import (
        on_main_process,
        progress,
        single_process_scope,
    )
    from instep.distributed.communication.scopes import print as print  # noqa: A004
    from instep.distributed.identity.world import World
    from instep.distributed.rendezvous.bootstrap import init
    from instep.errors import InstepError
    from instep.launch.spawn import spawn
    from instep.training.accumulation import accumulate, no_sync
    from instep.training.buckets.compression import PowerSGD
    from instep.training.checkpoint.checkpoint import Checkpoint
    from instep.training.gradients import weight
    from instep.training.metrics import Accuracy, Mean, Metric, gather_rows
    from instep.training.replicas import replicate
    from instep.training.shards import shard

    world: World
    """This process's rank and the job's size."""
    rank: int
    """The number of this process in the job, from 0."""
    world_size: int
    """The number of processes in the job."""
    is_main_process: bool
    """Whether this is rank 0."""
    in_mpi: bool
    """Whether the job has several processes (Jittor's name; any launcher will do)."""
    local_rank: int
    """The number of this process on its host, from 0."""

_MODULES = {
    "Accuracy": "training.metrics",
    "Checkpoint": "training.checkpoint.checkpoint",
    "Group": "distributed.communication.groups",
    "InstepError": "errors",
    "Mean": "training.metrics",
    "Metric": "training.metrics",
    "PowerSGD": "training.buckets.compression",
    "World": "distributed.identity.world",
    "accumulate": "training.accumulation",
    "all_gather": "distributed.communication.exchanges",
    "all_gather_object": "distributed.communication.objects",
    "all_reduce": "distributed.communication.collectives",
    "all_to_all": "distributed.communication.exchanges",
    "barrier": "distributed.communication.collectives",
    "broadcast": "distributed.communication.collectives",
    "broadcast_object": "distributed.communication.objects",
    "gather": "distributed.communication.exchanges",
    "gather_object": "distributed.communication.objects",
    "gather_rows": "training.metrics",
    "group": "distributed.communication.groups",
    "init": "distributed.rendezvous.bootstrap",
    "no_sync": "training.accumulation",
    "on_main_process": "distributed.communication.scopes",
    "print": "distributed.communication.scopes",
    "progress": "distributed.communication.scopes",
    "recv": "distributed.communication.point_to_point",
    "reduce": "distributed.communication.collectives",
    "reduce_scatter": "distributed.communication.collectives",
    "replicate": "training.replicas",
    "scatter": "distributed.communication.exchanges",
    "send": "distributed.communication.point_to_point",
    "shard": "training.shards",
    "single_process_scope": "distributed.communication.scopes",
    "spawn": "launch.spawn",
    "weight": "training.gradients",
}
_PUBLIC_MODULES = ("errors", "precision")
_WORLD_ATTRIBUTES = {
    "in_mpi": "parallel",
    "is_main_process": "is_main_process",
    "local_rank": "local_rank",
    "rank": "rank",
    "world_size": "size",
}

__all__ = [  # not print: `from instep import *` must not replace Python's
    "Accuracy",
    "Checkpoint",
    "Group",
    "InstepError",
    "Mean",
    "Metric",
    "PowerSGD",
    "World",
    "accumulate",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather",
    "gather_object",
    "gather_rows",
    "group",
    "in_mpi",
    "init",
    "is_main_process",
    "local_rank",
    "no_sync",
    "on_main_process",
    "progress",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "replicate",
    "scatter",
    "send",
    "shard",
    "single_process_scope",
    "spawn",
    "weight",
    "world",
    "world_size",
]


if TYPE_CHECKING:
    from instep import errors as errors
    from instep import precision as precision
else:  # type checkers would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(import_module(f"instep.{_MODULES[name]}"), name)
        if name == "world" or name in _WORLD_ATTRIBUTES:
            current = import_module("instep.distributed.rendezvous.bootstrap").current()
            return current if name == "world" else getattr(current, _WORLD_ATTRIBUTES[name])
        if name in _PUBLIC_MODULES:
            return import_module(f"instep.{name}")
        raise AttributeError(f"module 'instep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "print", *_PUBLIC_MODULES]
