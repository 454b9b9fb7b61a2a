"""`instep.spawn` on a Ray cluster: each rank is an actor."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from instep.launch.errors import RankFailedError
from instep.process import settings


def run_actors(
    fn: Callable[..., Any], args: Sequence[Any], nprocs: int, options: Mapping[str, Any]
) -> list[Any]:
    """Call `fn(i, *args)` in `nprocs` actors, and return the results in the order of ranks.

    Ranks of one node have consecutive numbers. It waits until the cluster has room for all
    actors; none is left when it returns or raises. Raises RankFailedError.
    """
    import ray

    actor_class = ray.remote(**({"num_cpus": 1} | dict(options)))(_Actor)
    actors = [actor_class.remote() for _ in range(nprocs)]
    try:
        nodes = ray.get([actor.node.remote() for actor in actors])
        order = sorted(range(nprocs), key=lambda i: (nodes.index(nodes[i]), i))
        host, port = ray.get(actors[order[0]].free_address.remote())
        common = {"WORLD_SIZE": nprocs, "MASTER_ADDR": host, "MASTER_PORT": port}
        common[settings.SECRET.name] = secrets.token_hex(32)
        on_node = Counter(nodes)
        before: Counter[str] = Counter()
        calls = {}
        for rank, i in enumerate(order):
            local = {"LOCAL_RANK": before[nodes[i]], "LOCAL_WORLD_SIZE": on_node[nodes[i]]}
            before[nodes[i]] += 1
            environ = {k: str(v) for k, v in (common | local | {"RANK": rank}).items()}
            arguments = (local["LOCAL_RANK"], *args)
            calls[actors[i].call.remote(environ, sys.argv, fn, arguments)] = rank
        waiting = list(calls)
        failures: list[tuple[bool, int, Exception]] = []
        while waiting and all(is_consequence for is_consequence, *_ in failures):
            (done,), waiting = ray.wait(waiting)
            try:
                ray.get(done)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                is_consequence = getattr(cause, "caused_by_another_rank", False)
                failures.append((is_consequence, calls[done], error))
        if failures:
            _, rank, first = min(failures, key=lambda failure: failure[0])
            raise RankFailedError(str(first), rank, 1) from first
        results: list[Any] = ray.get(list(calls))
        return results
    finally:
        for actor in actors:
            ray.kill(actor)


class _Actor:
    """A rank of the job."""

    def node(self) -> str:
        """The node's id."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def free_address(self) -> tuple[str, int]:
        """This node's address, and a port that is free now."""
        import ray

        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def call(
        self, environ: dict[str, str], argv: list[str], fn: Callable[..., Any], args: Sequence[Any]
    ) -> Any:
        """The function's result on this rank."""
        os.environ.update(environ)
        sys.argv = argv  # Ray's own differ between actors, which are ranks of one job
        return fn(*args)
