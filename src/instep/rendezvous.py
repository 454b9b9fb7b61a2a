"""From a World to a process group, and out of it again.

The engine is torch.distributed: NCCL between GPUs, Gloo between CPUs. A world of one needs none.
"""

from __future__ import annotations

import atexit
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlparse

import torch
import torch.distributed as dist

# Imported later, its default arguments capture the process group, which then outlives its
# destruction; a Gloo thread that lets a tensor go while Python ends aborts the process.
import torch.distributed.nn.functional

from instep import knobs, launchers, meeting, notice, shm
from instep.errors import (
    DeviceError,
    LaunchVariablesError,
    LeftoverRendezvousError,
    PortInUseError,
    RendezvousError,
)
from instep.identity import World

_INTERFACE = "GLOO_SOCKET_IFNAME"
_ones: list[World] = []
"""The worlds of one that this process is in now, the innermost last."""


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
    the loopback interface (except where torchrun hosts the store). With GPUs, the rank's own
    device becomes the current one.

    Raises PortInUseError, LeftoverRendezvousError, RendezvousError, DeviceError or
    LaunchVariablesError.
    """
    if dist.is_initialized() or _ones:
        return current()
    world = _asked_for(rank, world_size)
    if world.size == 1:
        return world
    timeout = timeout or timedelta(seconds=int(knobs.TIMEOUT))
    device = _take_device(world)
    store = _store(method, world, timeout)
    with _loopback_only(world):
        dist.init_process_group(
            _backend(world, device),
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    atexit.register(_leave)
    _no_device_twice(world, device)
    return world


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


def _backend(world: World, device: torch.device) -> str:
    """What the ranks talk through, in torch's words."""
    asked = str(knobs.BACKEND)
    if asked not in ("gloo", "shm"):
        raise RendezvousError(f"INSTEP_BACKEND={asked} is unknown; it is gloo or shm.")
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    return shm.NAME if asked == "shm" and world.one_host else "gloo"


def _leave() -> None:
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
        source="the arguments of instep.init",
    )


# ---------------------------------------------------------------------------------- the store


def _store(method: str | dist.Store | None, world: World, timeout: timedelta) -> dist.Store:
    if isinstance(method, dist.Store):
        return method
    url = urlparse(method or "env://")
    if url.scheme == "env":
        return _store_of_environment(os.environ, world, timeout)
    if url.scheme == "tcp" and url.hostname and url.port:
        return _tcp_store(url.hostname, url.port, world, timeout)
    if url.scheme == "file" and url.path:
        return _file_store(url.path, world, timeout)
    raise RendezvousError(
        f"cannot meet at {method!r}; use env://, tcp://host:port, file:///path or a Store."
    )


def _store_of_environment(
    environ: Mapping[str, str], world: World, timeout: timedelta
) -> dist.Store:
    both = ("MASTER_ADDR", "MASTER_PORT")
    present = {name: environ[name] for name in both if name in environ}
    if not present:
        return _store_at(launchers.meeting_place(world, environ), world, timeout)
    if missing := [name for name in both if name not in environ]:
        raise LaunchVariablesError.half_set(world.source, present, missing)
    host = environ["MASTER_ADDR"]
    try:
        port = int(environ["MASTER_PORT"])
    except ValueError:
        raise LaunchVariablesError.not_a_number("MASTER_PORT", environ["MASTER_PORT"]) from None
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(host, port, world.size, is_master=False, timeout=timeout)
    handed_down = environ.get(launchers.STORE_FD)
    if world.rank == 0 and handed_down is not None:
        listener = socket.socket(fileno=int(handed_down))
        return _serve(listener, world, timeout)
    return _tcp_store(host, port, world, timeout)


def _store_at(place: meeting.Place, world: World, timeout: timedelta) -> dist.Store:
    if isinstance(place, meeting.PrivateFile):
        return _noted_store(place.path, world, timeout)
    # Should another job hold this port, its keys are none of ours.
    return dist.PrefixStore(place.job, _tcp_store(place.host, place.port, world, timeout))


def _noted_store(path: str, world: World, timeout: timedelta) -> dist.Store:
    """One host: rank 0 takes a free port, and says which in the file until all have come."""
    seconds = timeout.total_seconds()
    if world.rank != 0:
        port = notice.read(path, seconds)
        if port is None:
            raise RendezvousError.absent([0], world.size, seconds)
        store = _tcp_store(notice.HOST, port, world, timeout)
        store.set(f"instep/here{world.rank}", "")
        return store
    listener = socket.create_server((notice.HOST, 0))
    with notice.put_up(path, listener.getsockname()[1]):
        store = _serve(listener, world, timeout)
        _wait_for_all(store, world, timeout)
    return store


def _wait_for_all(store: dist.Store, world: World, timeout: timedelta) -> None:
    here = {rank: f"instep/here{rank}" for rank in range(1, world.size)}
    try:
        store.wait(list(here.values()), timeout)
    except dist.DistStoreError:
        absent = [rank for rank, key in here.items() if not store.check([key])]
        raise RendezvousError.absent(absent, world.size, timeout.total_seconds()) from None


def _tcp_store(host: str, port: int, world: World, timeout: timedelta) -> dist.Store:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise RendezvousError.unresolved(host, str(error.strerror)) from None
    if world.rank != 0:
        return dist.TCPStore(host, port, world.size, is_master=False, timeout=timeout)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(host, port) from None
        raise RendezvousError(
            f"rank 0 cannot listen on {host}:{port} ({error.strerror}); "
            "the master must be an address of rank 0's own host."
        ) from None
    return _serve(listener, world, timeout)


def _serve(listener: socket.socket, world: World, timeout: timedelta) -> dist.Store:
    """Rank 0's store on a socket that is bound already: TCPStore alone binds every interface."""
    listener.listen(socket.SOMAXCONN)
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host,
        port,
        world.size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _file_store(path: str, world: World, timeout: timedelta) -> dist.Store:
    try:
        store = dist.FileStore(path, world.size)
        store.set_timeout(timeout)
        met_before = store.add(f"instep/rank{world.rank}", 1) > 1
    except RuntimeError as error:
        raise RendezvousError(f"cannot meet in the file {path}: {error}") from error
    if met_before:
        raise LeftoverRendezvousError(path, world.rank)
    return store


@contextmanager
def _loopback_only(world: World) -> Iterator[None]:
    """Gloo takes its interface from the environment and from nowhere else."""
    if not world.one_host or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


# --------------------------------------------------------------------------------- the device


def _take_device(world: World) -> torch.device:
    """This rank's own accelerator, made the current one before anything touches a device."""
    if str(knobs.DEVICE) == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if 1 < visible < world.local_size:
        raise DeviceError.too_few(world.local_size, visible)
    device = torch.device("cuda", world.local_rank % visible)
    torch.cuda.set_device(device)
    return device


def _no_device_twice(world: World, device: torch.device) -> None:
    """A launcher may show each rank one GPU, and the same to two of them."""
    if device.type != "cuda":
        return
    mine = f"{socket.gethostname()}, {torch.cuda.get_device_properties(device).uuid}"
    claims: list[str] = [""] * world.size
    dist.all_gather_object(claims, mine)
    for claimed, ranks in ranks_by(claims).items():
        if len(ranks) > 1:
            raise DeviceError.shared(claimed, ranks)


def ranks_by(values: list[str]) -> dict[str, list[int]]:
    """Which ranks hold which value: the index of `values` is the rank."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return holders
