"""The store through which ranks find each other: by environment, address, file, or handed over.

On one host it listens on the loopback interface only (except where torchrun hosts it).
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from urllib.parse import urlparse

import torch.distributed as dist

from instep.errors import (
    LaunchError,
    LaunchVariablesError,
    LeftoverRendezvousError,
    RendezvousError,
)
from instep.identity import launchers, places
from instep.identity.siblings import Siblings
from instep.identity.world import World
from instep.meeting import interfaces, notice, rollcall
from instep.meeting.listening import ANYWHERE, handed_down, only, reserve, resolve
from instep.meeting.vigil import Vigil


def open_store(
    method: str | dist.Store | None, world: World, timeout: timedelta
) -> tuple[dist.Store, str | None]:
    """This rank's end of the store at which all have arrived; the interface that joins them.

    Raises RendezvousError and its siblings under LaunchError.
    """
    with ExitStack() as until_all_have_come:
        arrival = _Arrival(world, timeout, launchers.siblings(world), until_all_have_come)
        store = _open(method, arrival)
        one_host = rollcall.call(store, world, timeout, arrival.siblings)
    if one_host:
        return store, interfaces.LOOPBACK
    return store, interfaces.interface_towards(_master_of(store))


@dataclass(frozen=True)
class _Arrival:
    """A rank on its way to the store."""

    world: World
    timeout: timedelta
    siblings: Siblings | None
    until_all_have_come: ExitStack

    def find_rank_0(self, look: Callable[[], tuple[str, int] | None]) -> dist.Store:
        """Its store, at the address that `look` finds sooner or later."""
        first_here = 1 if self.world.node_rank == 0 else 0
        speaks = self.world.local_rank == first_here
        seconds = self.timeout.total_seconds()
        return self.client(
            *Vigil(self.world.size, seconds, self.siblings, speaks=speaks).until(look)
        )

    def client(self, host: str, port: int) -> dist.Store:
        """A store that somebody hosts there."""
        try:
            return dist.TCPStore(host, port, self.world.size, is_master=False, timeout=self.timeout)
        except dist.DistNetworkError:
            seconds = self.timeout.total_seconds()
            raise RendezvousError.absent([0], self.world.size, seconds) from None

    def serve(self, listener: socket.socket) -> dist.Store:
        """The store of rank 0, which this is."""
        return serve(listener, self.world.size, self.timeout)


_kept: dict[tuple[str, int], dist.Store] = {}
"""The stores at MASTER_ADDR and MASTER_PORT. Their ports are taken until this process ends."""
_turns: Counter[tuple[str, int]] = Counter()


def again(host: str, port: int) -> dist.Store | None:
    """The store at which this process has met there before, for another meeting of all ranks.

    A script that runs unedited until it makes a process group of its own meets twice.
    """
    store = _kept.get((host, port))
    if store is None:
        return None
    _turns[host, port] += 1
    return dist.PrefixStore(f"again{_turns[host, port]}", store)


def _master_of(store: dist.Store) -> str | None:
    """The host at which rank 0 listens, as this rank knows it; None where nobody says."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore) and store.host != ANYWHERE:
        return store.host
    return None


def _open(method: str | dist.Store | None, arrival: _Arrival) -> dist.Store:
    if isinstance(method, dist.Store):
        return method
    url = urlparse(method or "env://")
    if url.scheme == "env":
        return _store_of_environment(os.environ, arrival)
    if url.scheme == "tcp" and url.hostname and url.port:
        return _tcp_store(url.hostname, url.port, arrival)
    if url.scheme == "file" and url.path:
        return _file_store(url.path, arrival.world, arrival.timeout)
    raise RendezvousError(
        f"cannot meet at {method!r}; use env://, tcp://host:port, file:///path or a Store."
    )


def _store_of_environment(environ: Mapping[str, str], arrival: _Arrival) -> dist.Store:
    world = arrival.world
    both = ("MASTER_ADDR", "MASTER_PORT")
    present = {name: environ[name] for name in both if name in environ}
    if not present:
        return _store_at(launchers.meeting_place(world, environ), arrival)
    if missing := [name for name in both if name not in environ]:
        raise LaunchVariablesError.half_set(world.source, present, missing)
    host = environ["MASTER_ADDR"]
    port = launchers.master_port(environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return arrival.client(host, port)
    if (met_before := again(host, port)) is not None:
        return met_before
    held = handed_down(port) if world.rank == 0 else None
    store = arrival.serve(held) if held is not None else _tcp_store(host, port, arrival)
    _kept[host, port] = store
    return store


def _store_at(place: places.Place, arrival: _Arrival) -> dist.Store:
    match place:
        case places.Address(host, port, job):
            return _tcp_store(host, port, arrival, job)
        case places.PrivateFile(path):
            return _noted_store(path, (notice.HOST,), arrival)
        case places.SharedFile(path):
            return _noted_store(path, interfaces.outer_addresses(), arrival)


def _noted_store(path: str, hosts: Sequence[str], arrival: _Arrival) -> dist.Store:
    """Rank 0 takes a free port, and says which in the file until all have come."""
    if arrival.world.rank != 0:
        return arrival.find_rank_0(partial(notice.read, path))
    listener = reserve(only(hosts))
    note = notice.put_up(path, listener.getsockname()[1], hosts)
    arrival.until_all_have_come.enter_context(note)
    return arrival.serve(listener)


def _tcp_store(host: str, port: int, arrival: _Arrival, job: str = "") -> dist.Store:
    """With the keys of `job`: should another one hold this port, its keys are none of ours."""

    def ours(store: dist.Store) -> dist.Store:
        return dist.PrefixStore(job, store) if job else store

    def of_rank_0() -> dist.Store:
        return ours(arrival.serve(reserve(host, port, one_host=arrival.world.one_host)))

    if arrival.world.rank == 0:
        return of_rank_0()
    resolve(host, port)
    try:
        return ours(
            arrival.find_rank_0(lambda: (host, port) if notice.answers(host, port) else None)
        )
    except RendezvousError as error:
        if arrival.siblings is not None and 0 in arrival.siblings.gone:
            with suppress(LaunchError):  # another one does
                rollcall.stand_in(of_rank_0(), error)
        raise


def serve(listener: socket.socket, size: int, timeout: timedelta) -> dist.TCPStore:
    """Rank 0's store on a socket that is bound already: TCPStore alone binds every interface."""
    listener.listen(socket.SOMAXCONN)
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host,
        port,
        size,
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
