"""The store at which the ranks meet: by environment, address, file, or given as an object.

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

from instep.distributed import interfaces
from instep.distributed.errors import AuthenticationError, LeftoverRendezvousError, RendezvousError
from instep.distributed.identity import endpoints, launchers
from instep.distributed.identity.authentication import check_private_file, make_secret, read_secret
from instep.distributed.identity.local_ranks import LocalRanks
from instep.distributed.identity.world import World
from instep.distributed.rendezvous import join_check, port_file, secret_handover
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
    """A store that all ranks have joined."""

    store: dist.Store
    """This rank's client of it, as torch made it: any process that reaches it may write."""
    interface: str | None
    """The network interface that connects the ranks; None where it cannot be found."""
    key: bytes | None
    """Signs the ranks' values; None where they have no secret in common."""


def open_store(method: str | dist.Store | None, world: World, timeout: timedelta) -> JoinedStore:
    """Join the other ranks. Raises RendezvousError and other kinds of LaunchError."""
    with ExitStack() as until_all_joined:
        secret = read_secret()
        joining = _Joining(world, timeout, launchers.local_ranks(world), secret, until_all_joined)
        store, secret = _open(method, joining)
        result = join_check.check_join(
            store, world, timeout, joining.local_ranks, secret, until_all_joined.close
        )
    if result.one_host:
        return JoinedStore(store, interfaces.LOOPBACK, result.key)
    return JoinedStore(store, interfaces.find_interface(store_host(store)), result.key)


@dataclass(frozen=True)
class _Joining:
    """A rank that has not reached the store yet."""

    world: World
    timeout: timedelta
    local_ranks: LocalRanks | None
    secret: bytes | None
    """As given; a file at which the ranks meet may hold one."""
    until_all_joined: ExitStack

    def wait_for(self, attempt: Callable[[], T | None]) -> T:
        """The first result of `attempt`, which looks for rank 0; one rank of each host prints."""
        first_here = 1 if self.world.node_rank == 0 else 0
        prints = self.world.local_rank == first_here
        seconds = self.timeout.total_seconds()
        return ArrivalWait(self.world.size, seconds, self.local_ranks, prints=prints).until(attempt)

    def client(self, host: str, port: int) -> dist.Store:
        """A client of the store there."""
        try:
            return dist.TCPStore(host, port, self.world.size, is_master=False, timeout=self.timeout)
        except dist.DistNetworkError:
            seconds = self.timeout.total_seconds()
            raise RendezvousError.absent([0], self.world.size, seconds) from None

    def serve(self, listener: socket.socket) -> dist.Store:
        """The store, if this is rank 0."""
        return serve_store(listener, self.world.size, self.timeout)


_stores: dict[tuple[str, int], dist.Store] = {}
"""The stores at MASTER_ADDR and MASTER_PORT. Their ports are taken until this process ends."""
_reopened: Counter[tuple[str, int]] = Counter()


def reopen(host: str, port: int) -> dist.Store | None:
    """The store that this process has joined there before, for another rendezvous of all ranks.

    A script that runs unedited until it makes a process group of its own joins twice.
    """
    store = _stores.get((host, port))
    if store is None:
        return None
    _reopened[host, port] += 1
    return dist.PrefixStore(f"again{_reopened[host, port]}", store)


def clear() -> None:
    """Close the stores that this process has joined: another world may meet at the same port."""
    _stores.clear()
    _reopened.clear()


def has_agent_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the store is torchrun's, which outlives ranks: they are restarted."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_host(store: dist.Store) -> str | None:
    """The host at which rank 0 listens, as this rank knows it; None where it is not known."""
    while isinstance(store, dist.PrefixStore | VerifiedStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore) and store.host != ALL_INTERFACES:
        return store.host
    return None


_Found = tuple[dist.Store, bytes | None]
"""A store, and the secret of the ranks that meet there."""


def _open(method: str | dist.Store | None, joining: _Joining) -> _Found:
    if isinstance(method, dist.Store):
        return method, joining.secret
    url = urlparse(method or "env://")
    if url.scheme == "env":
        return _store_from_environment(os.environ, joining)
    if url.scheme == "tcp" and url.hostname and url.port:
        store = _tcp_store(url.hostname, url.port, joining)
        return store, _secret(store, url.hostname, url.port, joining)
    if url.scheme == "file" and url.path:
        return _file_store(url.path, joining)
    raise RendezvousError(
        f"cannot meet at {method!r}; use env://, tcp://host:port, file:///path or a Store."
    )


def _store_from_environment(environ: Mapping[str, str], joining: _Joining) -> _Found:
    world = joining.world
    both = ("MASTER_ADDR", "MASTER_PORT")
    present = {name: environ[name] for name in both if name in environ}
    if not present:
        return _store_at_endpoint(launchers.endpoint(world, environ), joining)
    if missing := [name for name in both if name not in environ]:
        raise LaunchVariablesError.incomplete(world.source, present, missing)
    host = environ["MASTER_ADDR"]
    port = launchers.master_port(environ)
    store = reopen(host, port)
    if store is None:
        store = _stores[host, port] = _store_at_master(host, port, environ, joining)
    return store, _secret(store, host, port, joining)


def _store_at_master(
    host: str, port: int, environ: Mapping[str, str], joining: _Joining
) -> dist.Store:
    if has_agent_store(environ):
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"instep/attempt{attempt}", joining.client(host, port))
    listener = inherited_listener(port) if joining.world.rank == 0 else None
    return joining.serve(listener) if listener is not None else _tcp_store(host, port, joining)


def _secret(store: dist.Store, host: str, port: int, joining: _Joining) -> bytes | None:
    """The one that this rank was given. Else, where all ranks are known to be on one host, rank 0
    draws one and hands it over to this user's processes. Else none."""
    world = joining.world
    if joining.secret is not None or not (
        interfaces.is_loopback(host) or launchers.is_one_host(world)
    ):
        return joining.secret
    address = str(resolve(host, port)[1][0])
    if world.rank != 0:
        return joining.wait_for(partial(_request_secret, store, address, port, world.size))
    secret = make_secret()
    joining.until_all_joined.enter_context(secret_handover.serve_secret(address, port, secret))
    return secret


def _request_secret(store: dist.Store, address: str, port: int, size: int) -> bytes | None:
    """None where rank 0 has not joined: it hands over from before it sets its fingerprint."""
    try:
        join_check.raise_reported_error(store)
        has_joined = join_check.has_joined(store, 0)
        return secret_handover.request_secret(address, port)
    except dist.DistNetworkError:
        raise RendezvousError.ended([0], size, "its host") from None
    except ConnectionRefusedError:
        if has_joined:
            raise AuthenticationError(
                "rank 0 hands no secret to this rank: it was given one of its own (INSTEP_SECRET, "
                "or the file ~/.instep/secret), or it is in another network namespace than this "
                "rank, or it has ended. Give all ranks the same INSTEP_SECRET."
            ) from None
        return None


def _store_at_endpoint(endpoint: endpoints.Endpoint, joining: _Joining) -> _Found:
    match endpoint:
        case endpoints.Address(host, port, job):
            store = _tcp_store(host, port, joining, job)
            return store, _secret(store, host, port, joining)
        case endpoints.PrivateFile(path):
            return _store_by_port_file(path, (port_file.LOOPBACK_HOST,), joining)
        case endpoints.SharedFile(path):
            return _store_by_port_file(path, interfaces.routable_addresses(), joining)


def _store_by_port_file(path: str, hosts: Sequence[str], joining: _Joining) -> _Found:
    """Rank 0 takes a free port, and keeps it and a secret in the file until all have joined."""
    if joining.world.rank != 0:
        read = joining.wait_for(partial(port_file.read, path))
        return joining.client(read.host, read.port), joining.secret or read.secret
    listener = bind(listen_address(hosts))
    published = port_file.publish(path, listener.getsockname()[1], hosts)
    secret = joining.until_all_joined.enter_context(published)
    return joining.serve(listener), joining.secret or secret


def _tcp_store(host: str, port: int, joining: _Joining, job: str = "") -> dist.Store:
    """With a prefix for the `job`: if another job holds this port, its keys are not used."""

    def with_prefix(store: dist.Store) -> dist.Store:
        return dist.PrefixStore(job, store) if job else store

    def serve() -> dist.Store:
        return with_prefix(joining.serve(bind(host, port, one_host=joining.world.one_host)))

    if joining.world.rank == 0:
        return serve()
    resolve(host, port)
    try:
        joining.wait_for(lambda: port_file.is_listening(host, port) or None)
        return with_prefix(joining.client(host, port))
    except RendezvousError as error:
        if joining.local_ranks is not None and 0 in joining.local_ranks.gone:
            with suppress(LaunchError):  # another rank does
                join_check.report_instead_of_rank_0(serve(), error, joining.secret)
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


def _file_store(path: str, joining: _Joining) -> _Found:
    """The file is this user's only: no other process can write to it, and it may hold a secret."""
    world = joining.world
    try:
        _make_private(path)
        store = dist.FileStore(path, world.size)
        store.set_timeout(joining.timeout)
        used_before = store.add(f"instep/rank{world.rank}", 1) > 1
        own_secret: Any = make_secret().hex()
        secret = store.compare_set("instep/secret", "", own_secret)
    except (OSError, RuntimeError) as error:
        raise RendezvousError(f"cannot meet in the file {path}: {error}") from error
    if used_before:
        raise LeftoverRendezvousError(
            f"the rendezvous file {path} was already used: rank {world.rank} has met there before. "
            "Delete it, and give each job a file of its own."
        )
    return store, joining.secret or secret


def _make_private(path: str) -> None:
    """Make it a regular file of this user's that no other user may open. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        if os.fstat(handle).st_uid == os.getuid():
            os.fchmod(handle, 0o600)
        check_private_file(handle)
    finally:
        os.close(handle)
