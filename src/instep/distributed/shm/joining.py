"""How the ranks of a new group agree on one mapping for each host, or on none.

They talk through the group's store: each says who it is, group rank 0 says which of them share a
host, the first of each host makes its memory and says where, each says whether it could map it,
group rank 0 says whether all could. Whatever is in the way is in the way of all: then the group
talks over Gloo.
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

from torch import Tensor
from torch.distributed import PrefixStore, Store

from instep.distributed.shm.exchange import Exchange, mapping_bytes
from instep.distributed.shm.memory.mapping import Place, map_memory, new_memory
from instep.distributed.shm.memory.peers import Peer
from instep.process.procfs import pid_space

Introduction = tuple[str, str, dict[str, int]]  # obstacle or "", host, the rank as a Peer


class CannotShareMemory(Exception):  # noqa: N818 - not a failure: a reason to use Gloo
    """Why these ranks do not use shared memory; the same on all of them.

    Empty where nothing is in the way, and every rank has its host for itself.
    """


def join(
    store: Store, rank: int, ranks: Sequence[int], default_timeout: Callable[[], timedelta]
) -> Exchange:
    """This rank's end of a new mapping of the group's ranks on this host.

    These are all of the group, or there are several hosts, each with equally many successive ranks
    of the group. Collective; `ranks` are the job's ranks of the group. Raises CannotShareMemory on
    all ranks or on none.
    """
    size = len(ranks)
    store.set(f"host/{rank}", json.dumps(_introduction(ranks[rank])))
    if rank == 0:
        store.set("plan", json.dumps(plan([_read(store, f"host/{r}") for r in range(size)])))
    agreed = _read(store, "plan")
    if isinstance(agreed, str):
        raise CannotShareMemory(agreed)
    host, place_here = divmod(rank, len(agreed[0]))
    peers = [Peer(**peer) for peer in agreed[host]]
    with ExitStack() as held:
        memory, problem = _map(PrefixStore(f"{host}/", store), held, place_here, peers)
        store.set(f"mapped/{rank}", json.dumps(problem))
        if rank == 0:
            problems = [_read(store, f"mapped/{r}") for r in range(size)]
            store.set("verdict", json.dumps("; ".join(filter(None, problems))))
        verdict = _read(store, "verdict")
    if memory is None or verdict:
        raise CannotShareMemory(verdict)
    return Exchange(memory, place_here, peers, default_timeout)


def obstacle(system: str = sys.platform, processor: str = platform.machine()) -> str:
    """What keeps this kind of machine from sharing memory, or ""."""
    if (system, processor) == ("linux", "x86_64"):
        return ""
    return f"it needs linux on x86_64, this is {system} on {processor}"


def _introduction(rank: int) -> Introduction:
    hindrance = obstacle()
    return (
        (hindrance, "", {}) if hindrance else ("", pid_space(), asdict(Peer.of_this_process(rank)))
    )


def plan(introductions: Sequence[Introduction]) -> list[list[dict[str, int]]] | str:
    """Group rank 0's answer: the ranks of each host, as peers, or why there is no shared memory."""
    obstacles = [hindrance for hindrance, _, _ in introductions if hindrance]
    if obstacles:
        return obstacles[0]
    by_host: dict[str, list[dict[str, int]]] = {}
    for _, host, peer in introductions:
        by_host.setdefault(host, []).append(peer)
    hosts = list(by_host.values())
    near = len(hosts[0])
    if len(hosts) == len(introductions) > 1:
        return ""
    in_a_row = [peer for host in hosts for peer in host] == [peer for _, _, peer in introductions]
    if not in_a_row or any(len(host) != near for host in hosts):
        return "the hosts (or containers) do not have equally many ranks each, one after the other"
    return hosts


def _map(
    store: Store, held: ExitStack, rank: int, peers: Sequence[Peer]
) -> tuple[Tensor | None, str]:
    """The memory of this host's ranks, which its first one makes; if there is none, why.

    It can be mapped as long as `held`.
    """
    size, problem = mapping_bytes(len(peers)), ""
    if rank == 0:
        made: Place | None = None
        try:
            made = held.enter_context(new_memory(size))
        except OSError as error:
            problem = f"{size} bytes of memory are not to be had ({error})"
        store.set("place", json.dumps(made and asdict(made)))
    place = _read(store, "place")
    if place is None:
        return None, problem
    try:
        return map_memory(Place(**place), size), ""
    except OSError as error:
        return None, f"rank {peers[rank].rank} cannot map the shared memory ({error})"


def _read(store: Store, key: str) -> Any:
    return json.loads(store.get(key))
