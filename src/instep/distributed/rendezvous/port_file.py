"""The port file of one job: the addresses and the port at which rank 0 listens, and a secret.

Rank 0 writes it, the others read it, and rank 0 removes it when all have joined. A file that a
killed job left behind has a port at which nobody listens, and is ignored. Only this user can read
it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from instep.distributed.errors import RendezvousError
from instep.distributed.identity.authentication import make_secret, read_private_file

LOOPBACK_HOST = "127.0.0.1"
_CONNECT_SECONDS = 2.0
"""Seconds within which an address of another host answers."""


class PortFile(NamedTuple):
    """What a port file says, for one of its addresses."""

    host: str
    """An address at which somebody listens."""
    port: int
    """The port there."""
    secret: bytes
    """Known to the readers of the file only."""


@contextmanager
def publish(path: str, port: int, hosts: Sequence[str] = (LOOPBACK_HOST,)) -> Iterator[bytes]:
    """Keep the file at `path` for a while; yields the secret in it.

    Raises RendezvousError where it cannot be written.
    """
    draft, secret = f"{path}.{os.getpid()}", make_secret()
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as file:
            file.write(" ".join([str(port), secret.hex(), *hosts]))
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(draft)
        raise _unusable(path, str(error.strerror)) from None
    try:
        yield secret
    finally:
        os.unlink(path)


def read(path: str) -> PortFile | None:
    """Host, port and secret, if the file is there and somebody listens.

    Raises RendezvousError for a file that is not this user's own, or no port file.
    """
    try:
        port, secret, *hosts = read_private_file(path).split()
        found = [PortFile(host, int(port), bytes.fromhex(secret)) for host in hosts]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, str(error.strerror)) from None
    except ValueError:
        raise _unusable(path, "it is no port file of instep's") from None
    return next((each for each in found if is_listening(each.host, each.port)), None)


def is_listening(host: str, port: int) -> bool:
    """Whether a process listens there."""
    with suppress(OSError), socket.create_connection((host, port), _CONNECT_SECONDS):
        return True
    return False


def _unusable(path: str, why: str) -> RendezvousError:
    return RendezvousError(
        f"cannot meet in the file {path}: {why}. Set TMPDIR to a folder of your own, the same "
        "on every rank, or export MASTER_ADDR and MASTER_PORT."
    )
