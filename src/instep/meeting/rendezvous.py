"""From a World to a process group, and out of it again.

The engine is torch.distributed: NCCL between GPUs, Gloo between CPUs. A world of one needs none.
"""

from __future__ import annotations

import atexit
import os
import socket
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported later, its default arguments capture the process group, which then outlives its
# destruction; a Gloo thread that lets a tensor go while Python ends aborts the process.
import torch.distributed.nn.functional

from instep import knobs, shm
from instep.errors import (
    DeviceError,
    InstepWarning,
    LaunchVariablesError,
    RendezvousError,
)
from instep.identity import launchers, visible
from instep.identity.siblings import environ_of
from instep.identity.world import World
from instep.meeting import interfaces, malloc, rollcall
from instep.meeting.stores import open_store
from instep.watch import attendant

_ones: list[World] = []
"""The worlds of one that this process is in now, the innermost last."""
_met: list[World] = []
"""The world whose ranks have met here: the launcher's variables need not be there any more."""
_watched: list[weakref.ref[dist.ProcessGroup]] = []
"""The last process group in which this rank is watched."""


def current() -> World:
    """Who this process is, right whenever it is asked: no side effects.

    A process group that exists is believed before the launcher's variables.
    Raises LaunchVariablesError when these are half set or contradictory.
    """
    if _ones:
        return _ones[-1]
    if not dist.is_initialized():
        return launchers.detect()
    rank, size = dist.get_rank(), dist.get_world_size()
    if _met and (_met[-1].rank, _met[-1].size) == (rank, size):
        return _met[-1]
    try:
        told = launchers.detect()
    except LaunchVariablesError:
        told = World()
    if (told.rank, told.size) == (rank, size):
        return told
    return World(rank=rank, size=size, local_rank=rank, local_size=size, source="torch.distributed")


def init(
    method: str | dist.Store | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | None = None,
) -> World:
    """Meet the other ranks; does nothing when they have met, or in a world of one.

    Everything in instep that needs the other ranks calls this by itself; call it for a
    rendezvous of your own: `env://`, `tcp://host:port`, `file://path` or a Store.
    `rank` and `world_size` are the launcher's unless given. On one host nothing listens beyond
    the loopback interface (except where torchrun hosts the store); on several, Gloo and NCCL take
    the interface that leads to the master (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are set
    where the user has not). With GPUs, the rank's own device becomes the current one; without, this
    process keeps memory that it has freed (up to 512 MiB, unless MALLOC_TRIM_THRESHOLD_ is set).

    Raises MixedJobError where the ranks are not of one job, PortInUseError,
    LeftoverRendezvousError, RendezvousError, BackendError, DeviceError or LaunchVariablesError.
    """
    if dist.is_initialized() or _ones:
        return current()
    knobs.check()
    world = _asked_for(rank, world_size)
    if world.size == 1:
        return world
    timeout = timeout or knobs.patience()
    device = _take_device(world)
    if device.type == "cpu":
        malloc.keep_what_is_freed()
    backend = _backend(world, device)
    store, interface = open_store(method, world, timeout)
    _tell_interface(interface)
    attendant.attend(world, store)
    if device.type == "cuda":
        claim(store, world, str(torch.cuda.get_device_properties(device).uuid))
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    _met[:] = [world]
    atexit.unregister(leave)  # from an earlier meeting
    atexit.register(leave)
    _note_watched()
    return world


def join() -> None:
    """Meet the other ranks, unless that has happened; whoever made the group, it is watched."""
    if not dist.is_initialized():
        init()
    elif not (_watched and _watched[0]() is dist.group.WORLD):
        _note_watched()
        world = current()
        if world.size > 1:
            attendant.attend(world, store())


def _note_watched() -> None:
    assert dist.group.WORLD is not None
    _watched[:] = [weakref.ref(dist.group.WORLD)]


def alone() -> bool:
    """Whether this process is in a world of one, made by `world_of_one`."""
    return bool(_ones)


@contextmanager
def world_of_one(source: str) -> Iterator[None]:
    """Let this process be a world of one for a while; `source` says who said so."""
    _ones.append(World(source=source))
    try:
        yield
    finally:
        _ones.pop()


def store() -> dist.Store:
    """The store of the default process group, whoever made it."""
    return dist.distributed_c10d._get_default_store()


def address_of_rank_0() -> str:
    """The name of rank 0's host by which the other hosts have found it; its own name in case of
    a rendezvous by file. Only where ranks have met."""
    place = store()
    while isinstance(place, dist.PrefixStore):
        place = place.underlying_store
    return place.host if isinstance(place, dist.TCPStore) else socket.gethostname()


def _backend(world: World, device: torch.device) -> str:
    """What the ranks talk through, in torch's words."""
    asked = str(knobs.BACKEND)
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    if asked == "gloo" or (asked == "auto" and world.one_host and shm.obstacle()):
        return "gloo"
    return shm.NAME  # between hosts, which may differ, the ranks agree on what they can do


def leave() -> None:
    """Forget the other ranks; does nothing where they have not met."""
    _met.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _asked_for(rank: int | None, world_size: int | None) -> World:
    if rank is None and world_size is None:
        return launchers.detect()
    if rank is None or world_size is None:
        raise RendezvousError("give both rank and world_size, or neither.")
    return World(
        rank=rank,
        size=world_size,
        local_rank=rank,
        local_size=world_size,
        source=rollcall.BY_THE_SCRIPT,
    )


def _tell_interface(name: str | None) -> None:
    """Gloo and NCCL take it from the environment and from nowhere else; what is there stays."""
    if name is not None:
        for variable in interfaces.VARIABLES:
            os.environ.setdefault(variable, name)


# --------------------------------------------------------------------------------- the device


def _take_device(world: World) -> torch.device:
    """This rank's own accelerator, made the current one before anything touches a device."""
    if str(knobs.DEVICE) == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = max(torch.cuda.device_count(), 1)
    told = world.source != rollcall.BY_THE_SCRIPT  # which does not say how many are on this host
    if told and 1 < count < world.local_size:
        raise DeviceError.too_few(world.local_size, count)
    device = torch.device("cuda", world.local_rank % count)
    torch.cuda.set_device(device)
    if (late := devices_set_too_late()) is not None:
        warnings.warn(late, InstepWarning, stacklevel=4)
    return device


def devices_set_too_late() -> str | None:
    """What is to be said if CUDA, which is in use here, does not know CUDA_VISIBLE_DEVICES."""
    said = os.environ.get(visible.VISIBLE)
    at_start = environ_of("self").get(visible.VISIBLE)
    # torch.cuda.device_count() may count the variable's entries, and lets ask for no other device.
    known, shown = torch.cuda.device_count(), torch.accelerator.device_count()
    uuids = [
        str(torch.cuda.get_device_properties(k).uuid) if k < known else "…" for k in range(shown)
    ]
    return visible.set_too_late(said, at_start, uuids)


def claim(store: dist.Store, world: World, device: str) -> None:
    """Raise DeviceError on all ranks where two have one accelerator. Before NCCL sees it.

    A launcher may show each rank one GPU, and the same to two of them.
    """
    store.set(f"instep/device{world.rank}", f"{socket.gethostname()}, {device}")
    claims = store.multi_get([f"instep/device{rank}" for rank in range(world.size)])
    for claimed, ranks in ranks_by([str(each, "utf-8") for each in claims]).items():
        if len(ranks) > 1:
            raise DeviceError.shared(claimed, ranks)


def ranks_by(values: list[str]) -> dict[str, list[int]]:
    """Which ranks hold which value: the index of `values` is the rank."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return holders
