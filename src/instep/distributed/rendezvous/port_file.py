"""A note for the ranks of one job: at which addresses, and at which port, rank 0 is, and a secret.

Rank 0 writes it, everybody else reads it, and rank 0 takes it down when all have come. A note that
a killed job left behind points to a port at which nobody listens: it is not believed. Nobody but
this user can read it.
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
_KNOCK = 2.0
"""Seconds within which an address of another host answers."""


class PortFile(NamedTuple):
    """What a note says."""

    host: str
    """An address at which somebody listens."""
    port: int
    """At this port."""
    secret: bytes
    """What only who can read the note knows."""


@contextmanager
def publish(path: str, port: int, hosts: Sequence[str] = (LOOPBACK_HOST,)) -> Iterator[bytes]:
    """Let the file say `port` for a while; yields the secret that it tells.

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

    Raises RendezvousError for a file that is not this user's own, or no note.
    """
    try:
        port, secret, *hosts = read_private_file(path).split()
        notes = [PortFile(host, int(port), bytes.fromhex(secret)) for host in hosts]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, str(error.strerror)) from None
    except ValueError:
        raise _unusable(path, "it is no port file of instep's") from None
    return next((note for note in notes if is_listening(note.host, note.port)), None)


def is_listening(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with suppress(OSError), socket.create_connection((host, port), _KNOCK):
        return True
    return False


def _unusable(path: str, why: str) -> RendezvousError:
    return RendezvousError(
        f"cannot meet in the file {path}: {why}. Set TMPDIR to a folder of your own, the same "
        "on every rank, or export MASTER_ADDR and MASTER_PORT."
    )
