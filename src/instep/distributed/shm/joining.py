"""The ranks of a new group agree on one mapping for each host, or on none.

They use the group's store. Each rank writes its host and process; group rank 0 writes the ranks of
each host; the first rank of each host creates the memory and writes its address; each rank writes
whether it could map it; group rank 0 writes whether all could. If any rank has a problem, the whole
group uses Gloo.
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
from instep.distributed.shm.memory.mapping import SharedMemory, create_memory, map_memory
from instep.distributed.shm.memory.peers import Peer
from instep.process.procfs import pid_space

_Member = tuple[str, str, dict[str, int]]  # obstacle or "", host, the rank as a Peer


class CannotShareMemory(Exception):  # noqa: N818 - not a failure: a reason to use Gloo
    """The reason why these ranks do not use shared memory; the same on all of them.

    Empty where every rank is alone on its host, which is no problem to report.
    """


def join(
    store: Store, rank: int, ranks: Sequence[int], default_timeout: Callable[[], timedelta]
) -> tuple[Exchange, list[int]]:
    """A new mapping that the group's ranks on this host share, and how many ranks each host has.

    All ranks of the group are on this host, or the ranks of each of several hosts are consecutive.
    Collective; `ranks` are the members as ranks of the job. Raises CannotShareMemory on all ranks
    or on none.
    """
    size = len(ranks)
    store.set(f"host/{rank}", json.dumps(_member(ranks[rank])))
    if rank == 0:
        members = [_read(store, f"host/{r}") for r in range(size)]
        store.set("hosts", json.dumps(group_by_host(members)))
    hosts = _read(store, "hosts")
    if isinstance(hosts, str):
        raise CannotShareMemory(hosts)
    sizes = [len(each) for each in hosts]
    host, host_rank = place_of(rank, sizes)
    peers = [Peer(**peer) for peer in hosts[host]]
    with ExitStack() as open_memory:
        memory, problem = _map(PrefixStore(f"{host}/", store), open_memory, host_rank, peers)
        store.set(f"mapped/{rank}", json.dumps(problem))
        if rank == 0:
            problems = [_read(store, f"mapped/{r}") for r in range(size)]
            store.set("problem", json.dumps("; ".join(filter(None, problems))))
        problem = _read(store, "problem")
    if memory is None or problem:
        raise CannotShareMemory(problem)
    exchange = Exchange(memory, host_rank, peers, default_timeout)
    exchange.open_peer_memory()
    return exchange, sizes


def place_of(rank: int, sizes: Sequence[int]) -> tuple[int, int]:
    """The host of a rank, and its rank on that host; `sizes`: how many ranks each host has."""
    host = 0
    while rank >= sizes[host]:
        rank -= sizes[host]
        host += 1
    return host, rank


def obstacle(system: str = sys.platform, processor: str = platform.machine()) -> str:
    """The reason why a machine of this type cannot share memory, or ""."""
    if (system, processor) == ("linux", "x86_64"):
        return ""
    return f"it needs linux on x86_64, this is {system} on {processor}"


def _member(rank: int) -> _Member:
    reason = obstacle()
    if reason:
        return reason, "", {}
    return "", pid_space(), asdict(Peer.of_this_process(rank))


def group_by_host(members: Sequence[_Member]) -> list[list[dict[str, int]]] | str:
    """The ranks of each host, as peers, or the reason for CannotShareMemory."""
    obstacles = [reason for reason, _, _ in members if reason]
    if obstacles:
        return obstacles[0]
    by_host: dict[str, list[dict[str, int]]] = {}
    for _, host, peer in members:
        by_host.setdefault(host, []).append(peer)
    hosts = list(by_host.values())
    if len(hosts) == len(members) > 1:
        return ""
    if [peer for host in hosts for peer in host] != [peer for _, _, peer in members]:
        return "the ranks of a host (or container) are not one after the other"
    return hosts


def _map(
    store: Store, open_memory: ExitStack, rank: int, peers: Sequence[Peer]
) -> tuple[Tensor | None, str]:
    """The memory of this host's ranks, which the first of them creates, or None and the problem.

    The other ranks can map it until `open_memory` is closed.
    """
    size, problem = mapping_bytes(len(peers)), ""
    if rank == 0:
        shared: SharedMemory | None = None
        try:
            shared = open_memory.enter_context(create_memory(size))
        except OSError as error:
            problem = f"{size} bytes of memory are not to be had ({error})"
        store.set("memory", json.dumps(shared and asdict(shared)))
    address = _read(store, "memory")
    if address is None:
        return None, problem
    try:
        return map_memory(SharedMemory(**address), size), ""
    except OSError as error:
        return None, f"rank {peers[rank].rank} cannot map the shared memory ({error})"


def _read(store: Store, key: str) -> Any:
    return json.loads(store.get(key))
