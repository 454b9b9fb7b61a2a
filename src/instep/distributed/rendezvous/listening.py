"""Listening sockets: at the one address that rank 0 was told, not at all addresses."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

from instep.distributed import interfaces
from instep.distributed.errors import PortInUseError, RendezvousError
from instep.distributed.identity import launchers
from instep.distributed.rendezvous.port_file import LOOPBACK_HOST

ALL_INTERFACES = "0.0.0.0"


def listen_address(hosts: Sequence[str]) -> str:
    """The one address to listen at; all, where others may connect to any of several."""
    return hosts[0] if len(hosts) == 1 else ALL_INTERFACES


def inherited_listener(port: int) -> socket.socket | None:
    """The socket that `instep run` has bound to this port for rank 0.

    None at a second call, and for a port that the script has chosen itself.
    """
    fd = os.environ.get(launchers.STORE_FD)
    if fd is None:
        return None
    try:
        listener = socket.socket(fileno=int(fd))
    except OSError:  # in a child of rank 0, which has not inherited it
        return None
    if listener.getsockname()[1:2] == (port,):
        del os.environ[launchers.STORE_FD]
        return listener
    listener.detach()
    return None


def bind(host: str, port: int = 0, *, one_host: bool = True) -> socket.socket:
    """A socket on `host`, bound to `port` or a free one, but not listening.

    A script may then bind the port itself: both allow it (SO_REUSEADDR).
    Raises PortInUseError, or RendezvousError where `host` is not an address of this host, or is
    loopback and cannot be reached.
    """
    family, address = resolve(host, port)
    if not one_host and interfaces.is_local_alias(host):
        family, address = socket.AF_INET, (ALL_INTERFACES, port)
    if address[0] == LOOPBACK_HOST:
        _check_loopback()
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
    return listener


def _check_loopback() -> None:
    """Raise RendezvousError where processes of this host cannot reach each other at loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK_HOST, 1))  # sends nothing
        except OSError as error:
            raise RendezvousError(
                f"the ranks of this host meet at {LOOPBACK_HOST}, which cannot be reached "
                f"({error.strerror}): the interface lo is down (`ip link set lo up`), or has no "
                "address of IPv4."
            ) from None


def listen(host: str, port: int = 0, *, one_host: bool = True) -> socket.socket:
    """As `bind`, and listening: a second one on the port fails. Raises the same."""
    listener = bind(host, port, one_host=one_host)
    try:
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise PortInUseError(host, port) from None
    return listener


def listen_on_free_port(host: str) -> socket.socket:
    """A socket that listens on a free port of this host's address `host`, and of all addresses
    where it is not this host's own."""
    try:
        listener = bind(host, one_host=False)
    except RendezvousError:
        listener = bind(ALL_INTERFACES)
    listener.listen(socket.SOMAXCONN)
    return listener


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The family and address of a name. Raises RendezvousError where it has none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise RendezvousError(
            f"the master's name {host!r} does not resolve: {error.strerror}. Export MASTER_ADDR "
            "and MASTER_PORT with an address of rank 0's host that every host knows."
        ) from None
    return family, address
