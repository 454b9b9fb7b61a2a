"""Elastic jobs, as `hvd.elastic`: the training goes on when ranks end, or are added.

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs:
            ...
            state.epoch += 1
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, epoch=0))

The ranks that live keep their processes and their memory: they go back to the last commit, meet in
a new world, and take over rank 0's state together with ranks that are new. `instep horovodrun
--min-np` starts such jobs; in any other job a failure ends the training, as without `run`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from instep.compat.horovod import driver_client
from instep.compat.horovod.basics import init, leave_world, shutdown
from instep.compat.horovod.elastic.sampler import ElasticSampler
from instep.compat.horovod.elastic.state import ObjectState, State, TorchState, __getattr__
from instep.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from instep.distributed.errors import BrokenGroupError
from instep.training.batches import loop_ends

P = ParamSpec("P")
S = TypeVar("S", bound=State)
R = TypeVar("R")


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A decorator for the function that trains; its first argument is the State.

    The function is called again from the last commit when a rank has ended, and from where it is
    when the hosts have changed. Raises what the function raises otherwise.
    """
    return run_fn(func, init)


def run_fn(
    func: Callable[Concatenate[S, P], R], reset: Callable[[], object]
) -> Callable[Concatenate[S, P], R]:
    """As `run`, with a function of the script's that lets this process meet the others again. The
    connections to those of the world before have ended when it is called."""

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = driver_client.connect()
        if driver is None:
            state.sync()
            return func(state, *args, **kwargs)
        driver.add_listener(state.on_hosts_updated)
        must_sync = True
        try:
            while True:
                try:
                    if must_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HostsUpdatedInterrupt as update:
                    state.save()  # what was not committed is not lost
                    must_sync = not update.skip_sync
                except (HorovodInternalError, BrokenGroupError):
                    state.restore()
                    must_sync = True
                leave_world()
                loop_ends.reset()
                state.clear_host_updates()
                reset()
                state.on_reset()
        finally:
            driver.remove_listener(state.on_hosts_updated)

    return cast(Callable[Concatenate[S, P], R], wrapper)


__all__ = [
    "ElasticSampler",
    "ObjectState",
    "State",
    "TorchState",
    "__getattr__",
    "init",
    "run",
    "run_fn",
    "shutdown",
]
