"""A note for the ranks of one job on one host: at which port of the loopback interface rank 0 is.

Rank 0 writes it, everybody else reads it, and rank 0 takes it down when all have come. A note that
a killed job left behind points to a port at which nobody listens: it is not believed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from instep.errors import RendezvousError

HOST = "127.0.0.1"
_PAUSE = 0.01
"""Seconds between two looks."""


@contextmanager
def put_up(path: str, port: int) -> Iterator[None]:
    """Let the file say `port` for a while. Raises RendezvousError where it cannot be written."""
    draft = f"{path}.{os.getpid()}"
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as file:
            file.write(f"{port}\n")
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(draft)
        raise RendezvousError.private_file(path, str(error.strerror)) from None
    try:
        yield
    finally:
        os.unlink(path)


def read(path: str, seconds: float) -> int | None:
    """The port, once the file is there and somebody listens; None if not within `seconds`.

    Raises RendezvousError for a file that is not this user's own.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        port = _port(path)
        if port is not None and _answers(port):
            return port
        time.sleep(_PAUSE)
    return None


def _port(path: str) -> int | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RendezvousError.private_file(path, str(error.strerror)) from None
    with open(handle) as file:
        if os.fstat(handle).st_uid != os.getuid():
            raise RendezvousError.private_file(path, "it belongs to another user")
        return int(file.read())


def _answers(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex((HOST, port)) == 0
