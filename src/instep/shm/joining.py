"""How the ranks of a new group agree on one mapping, or on none.

They talk through the group's store: each says who it is, group rank 0 makes the memory and says
where, each says whether it could map it, group rank 0 says whether all could. Whatever is in the
way is in the way of all: then the group talks over Gloo.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from instep.shm.exchange import Exchange, mapping_bytes
from instep.shm.mapping import Place, map_memory, new_memory
from instep.shm.peers import Peer, myself, this_host


class CannotShareMemory(Exception):  # noqa: N818 - not a failure: a reason to use Gloo
    """Why these ranks cannot use one mapping; the same on all of them."""


def join(
    store: Store, rank: int, ranks: Sequence[int], default_timeout: Callable[[], timedelta]
) -> Exchange:
    """This rank's end of a new mapping. Collective; `ranks` are the job's ranks of the group.

    Raises CannotShareMemory on all ranks or on none.
    """
    store.set(f"host/{rank}", json.dumps([_supported_host(), asdict(myself(ranks[rank]))]))
    size = len(ranks)
    with ExitStack() as held:
        if rank == 0:
            store.set("plan", _plan(held, [_read(store, f"host/{r}") for r in range(size)]))
        plan = _read(store, "plan")
        if isinstance(plan, str):
            raise CannotShareMemory(plan)
        try:
            memory = map_memory(Place(**plan["place"]), mapping_bytes(size))
            problem = ""
        except OSError as error:
            problem = f"rank {ranks[rank]} cannot map the shared memory ({error})"
        store.set(f"mapped/{rank}", json.dumps(problem))
        if rank == 0:
            problems = [_read(store, f"mapped/{r}") for r in range(size)]
            store.set("verdict", json.dumps("; ".join(filter(None, problems))))
        verdict = _read(store, "verdict")
    if verdict:
        raise CannotShareMemory(verdict)
    return Exchange(memory, rank, [Peer(**peer) for peer in plan["peers"]], default_timeout)


def _supported_host() -> list[str]:
    """[what is in the way or "", which host this is]."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return [f"it needs Linux on x86-64, not {sys.platform} on {platform.machine()}", ""]
    return ["", this_host()]


def _plan(held: ExitStack, hosts: Sequence[tuple[tuple[str, str], dict[str, int]]]) -> str:
    """Group rank 0's answer: the peers and the place of the memory, or a reason against it."""
    obstacles = [obstacle for (obstacle, _), _ in hosts if obstacle]
    if obstacles:
        return json.dumps(obstacles[0])
    if len({host for (_, host), _ in hosts}) > 1:
        return json.dumps("the ranks are on several hosts, or in several containers")
    try:
        place = held.enter_context(new_memory(mapping_bytes(len(hosts))))
    except OSError as error:
        return json.dumps(
            f"{mapping_bytes(len(hosts))} bytes of memory are not to be had ({error})"
        )
    return json.dumps({"place": asdict(place), "peers": [peer for _, peer in hosts]})


def _read(store: Store, key: str) -> Any:
    return json.loads(store.get(key))
