"""The store through which ranks find each other: by environment, address, file, or handed over.

On one host it listens on the loopback interface only (except where torchrun hosts it).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist

from instep import launchers, meeting, notice
from instep.errors import (
    LaunchVariablesError,
    LeftoverRendezvousError,
    PortInUseError,
    RendezvousError,
)
from instep.identity import World


def open_store(method: str | dist.Store | None, world: World, timeout: timedelta) -> dist.Store:
    """This rank's end of the store. Raises RendezvousError and its siblings under LaunchError."""
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
