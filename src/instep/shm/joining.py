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

Introduction = tuple[str, str, dict[str, int]]  # obstacle or "", host, the rank as a Peer


class CannotShareMemory(Exception):  # noqa: N818 - not a failure: a reason to use Gloo
    """Why these ranks cannot use one mapping; the same on all of them."""


def join(
    store: Store, rank: int, ranks: Sequence[int], default_timeout: Callable[[], timedelta]
) -> Exchange:
    """This rank's end of a new mapping. Collective; `ranks` are the job's ranks of the group.

    Raises CannotShareMemory on all ranks or on none.
    """
    size = len(ranks)
    store.set(f"host/{rank}", json.dumps(_introduction(ranks[rank])))
    with ExitStack() as held:
        if rank == 0:
            store.set("plan", plan(held, [_read(store, f"host/{r}") for r in range(size)]))
        agreed = _read(store, "plan")
        if isinstance(agreed, str):
            raise CannotShareMemory(agreed)
        try:
            memory = map_memory(Place(**agreed["place"]), mapping_bytes(size))
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
    return Exchange(memory, rank, [Peer(**peer) for peer in agreed["peers"]], default_timeout)


def obstacle(system: str = sys.platform, processor: str = platform.machine()) -> str:
    """What keeps this kind of machine from sharing memory, or ""."""
    if (system, processor) == ("linux", "x86_64"):
        return ""
    return f"it needs linux on x86_64, this is {system} on {processor}"


def _introduction(rank: int) -> Introduction:
    hindrance = obstacle()
    return (hindrance, "", {}) if hindrance else ("", this_host(), asdict(myself(rank)))


def plan(held: ExitStack, introductions: Sequence[Introduction]) -> str:
    """Group rank 0's answer in JSON: the peers and the place of the memory, or why there is none.

    The memory stays open as long as `held`.
    """
    obstacles = [hindrance for hindrance, _, _ in introductions if hindrance]
    if obstacles:
        return json.dumps(obstacles[0])
    if len({host for _, host, _ in introductions}) > 1:
        return json.dumps("the ranks are on several hosts, or in several containers")
    size = mapping_bytes(len(introductions))
    try:
        place = held.enter_context(new_memory(size))
    except OSError as error:
        return json.dumps(f"{size} bytes of memory are not to be had ({error})")
    return json.dumps({"place": asdict(place), "peers": [peer for _, _, peer in introductions]})


def _read(store: Store, key: str) -> Any:
    return json.loads(store.get(key))
