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

if TYPE_CHECKING:
    from instep.collectives import (
        all_gather,
        all_gather_object,
        all_reduce,
        barrier,
        broadcast,
        broadcast_object,
        gather_object,
    )
    from instep.errors import InstepError
    from instep.gradients import no_sync, weight
    from instep.identity import World
    from instep.metrics import Accuracy, Mean
    from instep.rendezvous import init
    from instep.replicas import replicate
    from instep.shards import shard

    world: World
    """Who this process is."""
    rank: int
    """Which of the job's processes this is, from 0."""
    world_size: int
    """How many processes the job has."""
    local_rank: int
    """Which of the processes on this host, from 0."""

__version__ = "0.1.0"

_HOMES = {
    "Accuracy": "metrics",
    "InstepError": "errors",
    "Mean": "metrics",
    "World": "identity",
    "all_gather": "collectives",
    "all_gather_object": "collectives",
    "all_reduce": "collectives",
    "barrier": "collectives",
    "broadcast": "collectives",
    "broadcast_object": "collectives",
    "gather_object": "collectives",
    "init": "rendezvous",
    "no_sync": "gradients",
    "replicate": "replicas",
    "shard": "shards",
    "weight": "gradients",
}
_OF_THE_WORLD = {"rank": "rank", "world_size": "size", "local_rank": "local_rank"}

__all__ = [
    "Accuracy",
    "InstepError",
    "Mean",
    "World",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather_object",
    "init",
    "local_rank",
    "no_sync",
    "rank",
    "replicate",
    "shard",
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
