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
from typing import Any, TypeVar
from urllib.parse import urlparse

import torch.distributed as dist

from instep.distributed.errors import AuthenticationError, LeftoverRendezvousError, RendezvousError
from instep.distributed.identity import endpoints, launchers
from instep.distributed.identity.authentication import check_private_file, make_secret, read_secret
from instep.distributed.identity.local_ranks import LocalRanks
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import interfaces, join_check, port_file, secret_handover
from instep.distributed.rendezvous.arrival_wait import ArrivalWait
from instep.distributed.rendezvous.listening import (
    ALL_INTERFACES,
    bind,
    inherited_listener,
    listen_address,
    resolve,
)
from instep.distributed.rendezvous.verified_store import VerifiedStore
from instep.errors import LaunchError
from instep.process.errors import LaunchVariablesError

T = TypeVar("T")


@dataclass(frozen=True)
class JoinedStore:
    """A store at which all ranks have arrived."""

    store: dist.Store
    """This rank's end of it, as torch made it: whoever reaches it may write."""
    interface: str | None
    """What joins the ranks; None where that cannot be told."""
    key: bytes | None
    """What marks what the ranks write; None where they have no secret in common."""


def open_store(method: str | dist.Store | None, world: World, timeout: timedelta) -> JoinedStore:
    """Meet the other ranks. Raises RendezvousError and its siblings under LaunchError."""
    with ExitStack() as until_all_have_come:
        secret = read_secret()
        arrival = _Arrival(
            world, timeout, launchers.local_ranks(world), secret, until_all_have_come
        )
        store, secret = _open(method, arrival)
        met = join_check.check_join(
            store, world, timeout, arrival.siblings, secret, until_all_have_come.close
        )
    if met.one_host:
        return JoinedStore(store, interfaces.LOOPBACK, met.key)
    return JoinedStore(store, interfaces.find_interface(store_host(store)), met.key)


@dataclass(frozen=True)
class _Arrival:
    """A rank on its way to the store."""

    world: World
    timeout: timedelta
    siblings: LocalRanks | None
    secret: bytes | None
    """What it was given; a file at which the ranks meet may tell one."""
    until_all_have_come: ExitStack

    def find(self, look: Callable[[], T | None]) -> T:
        """What `look` finds sooner or later of rank 0."""
        first_here = 1 if self.world.node_rank == 0 else 0
        speaks = self.world.local_rank == first_here
        seconds = self.timeout.total_seconds()
        return ArrivalWait(self.world.size, seconds, self.siblings, speaks=speaks).until(look)

    def client(self, host: str, port: int) -> dist.Store:
        """A store that somebody hosts there."""
        try:
            return dist.TCPStore(host, port, self.world.size, is_master=False, timeout=self.timeout)
        except dist.DistNetworkError:
            seconds = self.timeout.total_seconds()
            raise RendezvousError.absent([0], self.world.size, seconds) from None

    def serve(self, listener: socket.socket) -> dist.Store:
        """The store of rank 0, which this is."""
        return serve_store(listener, self.world.size, self.timeout)


_kept: dict[tuple[str, int], dist.Store] = {}
"""The stores at MASTER_ADDR and MASTER_PORT. Their ports are taken until this process ends."""
_turns: Counter[tuple[str, int]] = Counter()


def reopen(host: str, port: int) -> dist.Store | None:
    """The store at which this process has met there before, for another meeting of all ranks.

    A script that runs unedited until it makes a process group of its own meets twice.
    """
    store = _kept.get((host, port))
    if store is None:
        return None
    _turns[host, port] += 1
    return dist.PrefixStore(f"again{_turns[host, port]}", store)


def store_host(store: dist.Store) -> str | None:
    """The host at which rank 0 listens, as this rank knows it; None where nobody says."""
    while isinstance(store, dist.PrefixStore | VerifiedStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore) and store.host != ALL_INTERFACES:
        return store.host
    return None


_Found = tuple[dist.Store, bytes | None]
"""A store, and the secret of those who meet there."""


def _open(method: str | dist.Store | None, arrival: _Arrival) -> _Found:
    if isinstance(method, dist.Store):
        return method, arrival.secret
    url = urlparse(method or "env://")
    if url.scheme == "env":
        return _store_of_environment(os.environ, arrival)
    if url.scheme == "tcp" and url.hostname and url.port:
        store = _tcp_store(url.hostname, url.port, arrival)
        return store, _secret(store, url.hostname, url.port, arrival)
    if url.scheme == "file" and url.path:
        return _file_store(url.path, arrival)
    raise RendezvousError(
        f"cannot meet at {method!r}; use env://, tcp://host:port, file:///path or a Store."
    )


def _store_of_environment(environ: Mapping[str, str], arrival: _Arrival) -> _Found:
    world = arrival.world
    both = ("MASTER_ADDR", "MASTER_PORT")
    present = {name: environ[name] for name in both if name in environ}
    if not present:
        return _store_at(launchers.endpoint(world, environ), arrival)
    if missing := [name for name in both if name not in environ]:
        raise LaunchVariablesError.incomplete(world.source, present, missing)
    host = environ["MASTER_ADDR"]
    port = launchers.master_port(environ)
    store = reopen(host, port)
    if store is None:
        store = _kept[host, port] = _store_of_master(host, port, environ, arrival)
    return store, _secret(store, host, port, arrival)


def _store_of_master(
    host: str, port: int, environ: Mapping[str, str], arrival: _Arrival
) -> dist.Store:
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it outlives ranks, which come again
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"instep/attempt{attempt}", arrival.client(host, port))
    held = inherited_listener(port) if arrival.world.rank == 0 else None
    return arrival.serve(held) if held is not None else _tcp_store(host, port, arrival)


def _secret(store: dist.Store, host: str, port: int, arrival: _Arrival) -> bytes | None:
    """What this rank was given; else, where all ranks are known to be on one host, what rank 0
    draws and hands to this user's processes; else none."""
    world = arrival.world
    if arrival.secret is not None or not (
        interfaces.is_loopback(host) or launchers.is_one_host(world)
    ):
        return arrival.secret
    address = str(resolve(host, port)[1][0])
    if world.rank != 0:
        return arrival.find(partial(_handed_over, store, address, port, world.size))
    secret = make_secret()
    arrival.until_all_have_come.enter_context(secret_handover.hand_over(address, port, secret))
    return secret


def _handed_over(store: dist.Store, address: str, port: int, size: int) -> bytes | None:
    """None where rank 0 is still to come, which begins to hand over before it hands in its card."""
    try:
        join_check.raise_error_of_stand_in(store)
        is_there = join_check.has_arrived(store, 0)
        return secret_handover.request_secret(address, port)
    except dist.DistNetworkError:
        raise RendezvousError.ended([0], size, "its host") from None
    except ConnectionRefusedError:
        if is_there:
            raise AuthenticationError(
                "rank 0 hands no secret to this rank: it was given one of its own (INSTEP_SECRET, "
                "or the file ~/.instep/secret), or it is in another network namespace than this "
                "rank, or it has ended. Give all ranks the same INSTEP_SECRET."
            ) from None
        return None


def _store_at(place: endpoints.Endpoint, arrival: _Arrival) -> _Found:
    match place:
        case endpoints.Address(host, port, job):
            store = _tcp_store(host, port, arrival, job)
            return store, _secret(store, host, port, arrival)
        case endpoints.PrivateFile(path):
            return _noted_store(path, (port_file.LOOPBACK_HOST,), arrival)
        case endpoints.SharedFile(path):
            return _noted_store(path, interfaces.routable_addresses(), arrival)


def _noted_store(path: str, hosts: Sequence[str], arrival: _Arrival) -> _Found:
    """Rank 0 takes a free port, and says which in the file until all have come; and a secret."""
    if arrival.world.rank != 0:
        note = arrival.find(partial(port_file.read, path))
        return arrival.client(note.host, note.port), arrival.secret or note.secret
    listener = bind(listen_address(hosts))
    putting_up = port_file.publish(path, listener.getsockname()[1], hosts)
    secret = arrival.until_all_have_come.enter_context(putting_up)
    return arrival.serve(listener), arrival.secret or secret


def _tcp_store(host: str, port: int, arrival: _Arrival, job: str = "") -> dist.Store:
    """With the keys of `job`: should another one hold this port, its keys are none of ours."""

    def ours(store: dist.Store) -> dist.Store:
        return dist.PrefixStore(job, store) if job else store

    def of_rank_0() -> dist.Store:
        return ours(arrival.serve(bind(host, port, one_host=arrival.world.one_host)))

    if arrival.world.rank == 0:
        return of_rank_0()
    resolve(host, port)
    try:
        arrival.find(lambda: port_file.is_listening(host, port) or None)
        return ours(arrival.client(host, port))
    except RendezvousError as error:
        if arrival.siblings is not None and 0 in arrival.siblings.gone:
            with suppress(LaunchError):  # another one does
                join_check.stand_in_for_rank_0(of_rank_0(), error, arrival.secret)
        raise


def serve_store(listener: socket.socket, size: int, timeout: timedelta) -> dist.TCPStore:
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


def _file_store(path: str, arrival: _Arrival) -> _Found:
    """The file is this user's only, so that what lies in it is no stranger's, and no secret."""
    world = arrival.world
    try:
        _make_private(path)
        store = dist.FileStore(path, world.size)
        store.set_timeout(arrival.timeout)
        met_before = store.add(f"instep/rank{world.rank}", 1) > 1
        mine: Any = make_secret().hex()
        secret = store.compare_set("instep/secret", "", mine)
    except (OSError, RuntimeError) as error:
        raise RendezvousError(f"cannot meet in the file {path}: {error}") from error
    if met_before:
        raise LeftoverRendezvousError(path, world.rank)
    return store, arrival.secret or secret


def _make_private(path: str) -> None:
    """A regular file of this user's that nobody else may open. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        if os.fstat(handle).st_uid == os.getuid():
            os.fchmod(handle, 0o600)
        check_private_file(handle)
    finally:
        os.close(handle)
