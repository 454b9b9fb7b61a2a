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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

# Imported later, its default arguments capture the process group, which then outlives its
# destruction; a Gloo thread that lets a tensor go while Python ends aborts the process.
import torch.distributed.nn.functional

from instep.distributed import shm
from instep.distributed.errors import AuthenticationError, DeviceError, RendezvousError
from instep.distributed.identity import cuda_visible_devices, launchers
from instep.distributed.identity.authentication import derive_key, make_secret, read_secret
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import interfaces, join_check, listening, port_file
from instep.distributed.rendezvous.stores import open_store, store_host
from instep.distributed.rendezvous.verified_store import VerifiedStore
from instep.distributed.watchdog import client
from instep.errors import InstepWarning
from instep.process import malloc, settings
from instep.process.errors import LaunchVariablesError
from instep.process.exit_status import format_ranks
from instep.process.procfs import read_environ

_ones: list[World] = []
"""The worlds of one that this process is in now, the innermost last."""
_met: list[World] = []
"""The world whose ranks have met here: the launcher's variables need not be there any more."""
_watched: list[weakref.ref[dist.ProcessGroup]] = []
"""The last process group in which this rank is watched."""


@dataclass(frozen=True)
class _Trust:
    """What makes a world's messages known as its own."""

    key: bytes
    store: VerifiedStore
    """The world's store, for what instep itself has to say."""
    torchs: dist.Store | None
    """What torch was given; its C++ does not keep a Python object."""
    one_host: bool
    """Whether all ranks share one loopback interface, as far as is known."""


_OWN = make_secret()
_trusts: weakref.WeakKeyDictionary[dist.ProcessGroup, _Trust] = weakref.WeakKeyDictionary()
"""By the default process group."""


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
    LeftoverRendezvousError, RendezvousError, AuthenticationError, BackendError, DeviceError or
    LaunchVariablesError.
    """
    return _init(method, rank, world_size, timeout)


def init_with_prefix(prefix: str) -> World:
    """As `init`, with keys of its own in the store: who starts a process group there too finds none
    of ours."""
    return _init(None, None, None, None, prefix)


def _init(
    method: str | dist.Store | None,
    rank: int | None,
    world_size: int | None,
    timeout: timedelta | None,
    prefix: str = "",
) -> World:
    if dist.is_initialized() or _ones:
        return current()
    settings.check_variables()
    world = _asked_for(rank, world_size)
    if world.size == 1:
        return world
    timeout = timeout or settings.timeout()
    device = _take_device(world)
    if device.type == "cpu":
        malloc.keep_freed_memory()
    backend = _backend(world, device)
    opened = open_store(method, world, timeout)
    _tell_interface(opened.interface)
    bare = dist.PrefixStore(prefix, opened.store) if prefix else opened.store
    store = bare if opened.key is None else VerifiedStore(bare, opened.key)
    one_host = opened.interface == interfaces.LOOPBACK
    client.start_watcher(world, store, opened.key, partial(_listener, store, one_host))
    if device.type == "cuda":
        check_devices_differ(store, world, str(torch.cuda.get_device_properties(device).uuid))
    # NCCL's threads ask the store once a second as long as the job lasts: not of Python.
    torchs = bare if device.type == "cuda" else store
    dist.init_process_group(
        backend,
        store=torchs,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    _trust(opened.key or _drawn_key(), one_host, torchs)
    _met[:] = [world]
    atexit.unregister(leave)  # from an earlier meeting
    atexit.register(leave)
    _note_watched()
    return world


def ensure_init() -> None:
    """Meet the other ranks, unless that has happened; whoever made the group, it is watched."""
    if not dist.is_initialized():
        init()
    elif not (_watched and _watched[0]() is dist.group.WORLD):
        _note_watched()
        world = current()
        if world.size > 1:
            client.start_watcher(world, store(), key(), listener)


def _note_watched() -> None:
    assert dist.group.WORLD is not None
    _watched[:] = [weakref.ref(dist.group.WORLD)]


def is_world_of_one() -> bool:
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
    """The store of the default process group, whoever made it; what it says is verified.

    Collective the first time in a group that somebody else made, as `key`.
    """
    return _trusted().store


def key() -> bytes:
    """What marks the messages of the default process group: only its ranks know it. In a world of
    one this process's own.

    Collective the first time in a group that somebody else made. Raises AuthenticationError
    where not all of its ranks were given the same secret.
    """
    return _trusted().key if dist.is_initialized() else _OWN


def _trusted() -> _Trust:
    assert dist.group.WORLD is not None
    if dist.group.WORLD not in _trusts:
        _trust(_agreed_key(read_secret()), current().one_host)
    return _trusts[dist.group.WORLD]


def _trust(key: bytes, one_host: bool, torchs: dist.Store | None = None) -> None:
    assert dist.group.WORLD is not None
    below = dist.distributed_c10d._get_default_store()
    store = VerifiedStore(below, derive_key(key, "store"))
    _trusts[dist.group.WORLD] = _Trust(key, store, torchs, one_host)


def _agreed_key(secret: bytes | None) -> bytes:
    """Of the secret that all ranks were given, or drawn where none was."""
    mine = bytes(32) if secret is None else derive_key(secret, "which")
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(_home())
    heard = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(heard, sent)
    unlike = [rank for rank, each in enumerate(heard) if not torch.equal(each, heard[0])]
    if unlike:
        raise AuthenticationError(
            f"{format_ranks(unlike)} has another INSTEP_SECRET (or ~/.instep/secret), or none, "
            f"than {format_ranks({*range(len(heard))} - {*unlike})}. "
            "Give all ranks the same one, or none."
        )
    return _drawn_key() if secret is None else derive_key(secret, "group")


def _drawn_key() -> bytes:
    """Rank 0 draws it and tells the others, past the store. Collective."""
    drawn = torch.frombuffer(bytearray(make_secret()), dtype=torch.uint8).to(_home())
    dist.broadcast(drawn, 0)
    return drawn.cpu().numpy().tobytes()


def _home() -> torch.device:
    """Where a few bytes can travel in the default process group."""
    assert dist.group.WORLD is not None
    kinds = [device.type for device in dist.group.WORLD._device_types]
    return torch.device("cpu" if "cpu" in kinds else f"cuda:{torch.cuda.current_device()}")


def listener() -> tuple[socket.socket, str]:
    """On rank 0, a new socket for the other ranks to call, and the name by which they find its
    host: on the loopback interface where they share it, else at the address where they have met."""
    return _listener(store(), _trusted().one_host)


def _listener(store: dist.Store, one_host: bool) -> tuple[socket.socket, str]:
    host = port_file.LOOPBACK_HOST if one_host else store_host(store) or socket.gethostname()
    return listening.listen_on_free_port(host), host


def _backend(world: World, device: torch.device) -> str:
    """What the ranks talk through, in torch's words."""
    asked = str(settings.BACKEND)
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
        source=join_check.BY_THE_SCRIPT,
    )


def _tell_interface(name: str | None) -> None:
    """Gloo and NCCL take it from the environment and from nowhere else; what is there stays."""
    if name is not None:
        for variable in interfaces.IFNAME_VARIABLES:
            os.environ.setdefault(variable, name)


# --------------------------------------------------------------------------------- the device


def _take_device(world: World) -> torch.device:
    """This rank's own accelerator, made the current one before anything touches a device."""
    if str(settings.DEVICE) == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = max(torch.cuda.device_count(), 1)
    told = world.source != join_check.BY_THE_SCRIPT  # which does not say how many are on this host
    if told and 1 < count < world.local_size:
        raise DeviceError.too_few(world.local_size, count)
    device = torch.device("cuda", world.local_rank % count)
    torch.cuda.set_device(device)
    if (late := late_devices_warning()) is not None:
        warnings.warn(late, InstepWarning, stacklevel=4)
    return device


def late_devices_warning() -> str | None:
    """What is to be said if CUDA, which is in use here, does not know CUDA_VISIBLE_DEVICES."""
    said = os.environ.get(cuda_visible_devices.VARIABLE)
    at_start = read_environ("self").get(cuda_visible_devices.VARIABLE)
    # torch.cuda.device_count() may count the variable's entries, and lets ask for no other device.
    known, shown = torch.cuda.device_count(), torch.accelerator.device_count()
    uuids = [
        str(torch.cuda.get_device_properties(k).uuid) if k < known else "…" for k in range(shown)
    ]
    return cuda_visible_devices.late_change_warning(said, at_start, uuids)


def check_devices_differ(store: dist.Store, world: World, device: str) -> None:
    """Raise DeviceError on all ranks where two have one accelerator. Before NCCL sees it.

    A launcher may show each rank one GPU, and the same to two of them.
    """
    store.set(f"instep/device{world.rank}", f"{socket.gethostname()}, {device}")
    claims = store.multi_get([f"instep/device{rank}" for rank in range(world.size)])
    for claimed, ranks in group_ranks([str(each, "utf-8") for each in claims]).items():
        if len(ranks) > 1:
            raise DeviceError(
                f"{format_ranks(ranks)} share one GPU ({claimed}); each rank needs its own. "
                "Give every task one GPU, or start as many ranks as there are GPUs."
            )


def group_ranks(values: list[str]) -> dict[str, list[int]]:
    """Which ranks hold which value: the index of `values` is the rank."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return holders
