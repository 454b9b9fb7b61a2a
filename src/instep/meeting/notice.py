"""A note for the ranks of one job: at which addresses, and at which port, rank 0 is.

Rank 0 writes it, everybody else reads it, and rank 0 takes it down when all have come. A note that
a killed job left behind points to a port at which nobody listens: it is not believed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from instep.errors import RendezvousError

HOST = "127.0.0.1"
_KNOCK = 2.0
"""Seconds within which an address of another host answers."""


@contextmanager
def put_up(path: str, port: int, hosts: Sequence[str] = (HOST,)) -> Iterator[None]:
    """Let the file say `port` for a while. Raises RendezvousError where it cannot be written."""
    draft = f"{path}.{os.getpid()}"
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as file:
            file.write(" ".join([str(port), *hosts]))
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(draft)
        raise RendezvousError.private_file(path, str(error.strerror)) from None
    try:
        yield
    finally:
        os.unlink(path)


def read(path: str) -> tuple[str, int] | None:
    """Host and port, if the file is there and somebody listens.

    Raises RendezvousError for a file that is not this user's own.
    """
    port, hosts = _said(path)
    return next(((host, port) for host in hosts if answers(host, port)), None)


def _said(path: str) -> tuple[int, list[str]]:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0, []
    except OSError as error:
        raise RendezvousError.private_file(path, str(error.strerror)) from None
    with open(handle) as file:
        if os.fstat(handle).st_uid != os.getuid():
            raise RendezvousError.private_file(path, "it belongs to another user")
        port, *hosts = file.read().split()
        return int(port), hosts


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with suppress(OSError), socket.create_connection((host, port), _KNOCK):
        return True
    return False
