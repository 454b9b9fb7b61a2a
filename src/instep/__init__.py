"""instep: write for one process, run on many, get the same numbers.

    import instep

    model = instep.replicate(model)   # same parameters everywhere; the global batch's gradient
    loader = instep.shard(loader)     # this rank's block of every batch

and start it with `instep run -n 4 train.py`. Names are resolved when they are first used, so that
importing instep costs nothing and `instep.rank` is right whenever it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instep.version import __version__ as __version__

if TYPE_CHECKING:
    from instep.collectives import all_reduce, barrier, broadcast, reduce, reduce_scatter
    from instep.compressed import PowerSGD
    from instep.errors import InstepError
    from instep.exchanges import all_gather, all_to_all, gather, scatter
    from instep.gradients import no_sync, weight
    from instep.groups import Group, group
    from instep.identity import World
    from instep.launch.calling import spawn
    from instep.metrics import Accuracy, Mean
    from instep.objects import all_gather_object, broadcast_object, gather_object
    from instep.pairs import recv, send
    from instep.rendezvous import init
    from instep.replicas import replicate
    from instep.scopes import single_process_scope
    from instep.shards import shard

    world: World
    """Who this process is."""
    rank: int
    """Which of the job's processes this is, from 0."""
    world_size: int
    """How many processes the job has."""
    in_mpi: bool
    """Whether the job has several processes (Jittor's name; any launcher will do)."""
    local_rank: int
    """Which of the processes on this host, from 0."""

_HOMES = {
    "Accuracy": "metrics",
    "Group": "groups",
    "InstepError": "errors",
    "Mean": "metrics",
    "PowerSGD": "compressed",
    "World": "identity",
    "all_gather": "exchanges",
    "all_gather_object": "objects",
    "all_reduce": "collectives",
    "all_to_all": "exchanges",
    "barrier": "collectives",
    "broadcast": "collectives",
    "broadcast_object": "objects",
    "gather": "exchanges",
    "gather_object": "objects",
    "group": "groups",
    "init": "rendezvous",
    "no_sync": "gradients",
    "recv": "pairs",
    "reduce": "collectives",
    "reduce_scatter": "collectives",
    "replicate": "replicas",
    "scatter": "exchanges",
    "send": "pairs",
    "shard": "shards",
    "single_process_scope": "scopes",
    "spawn": "launch.calling",
    "weight": "gradients",
}
_OF_THE_WORLD = {
    "in_mpi": "parallel",
    "local_rank": "local_rank",
    "rank": "rank",
    "world_size": "size",
}

__all__ = [
    "Accuracy",
    "Group",
    "InstepError",
    "Mean",
    "PowerSGD",
    "World",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather",
    "gather_object",
    "group",
    "in_mpi",
    "init",
    "local_rank",
    "no_sync",
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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"instep.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name == "world" or name in _OF_THE_WORLD:
        current = import_module("instep.rendezvous").current()
        return current if name == "world" else getattr(current, _OF_THE_WORLD[name])
    raise AttributeError(f"module 'instep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
