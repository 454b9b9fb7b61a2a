"""The handover of the job's secret from rank 0 to the ranks of its host, which know only a port.

They connect to a Unix socket in the abstract namespace: it needs no folder, the processes of one
network namespace see it, and it ends with the process that holds it. Any user may listen or connect
there; so each side asks the kernel for the user of the other process.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

from instep.distributed.errors import AuthenticationError
from instep.process.procfs import CREDENTIALS

_REPLY_SECONDS = 1.0
"""Seconds within which rank 0 replies; then it is asked again."""
_SECRET_BYTES = 32


@contextmanager
def serve_secret(address: str, port: int, secret: bytes) -> Iterator[None]:
    """Send the `secret` to processes of this user for a while; they know `address` and `port`.

    Raises AuthenticationError where another process listens at that name.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_name(address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise _not_rank_0(port) from None
        listener.listen(socket.SOMAXCONN)
        replying = Thread(target=_reply, args=(listener, secret), daemon=True)
        replying.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread; to close does not
            replying.join()


def request_secret(address: str, port: int) -> bytes | None:
    """The secret; None where rank 0 has not replied yet.

    Raises ConnectionRefusedError where nobody listens, and AuthenticationError where the process
    that listens is another user's.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_REPLY_SECONDS)
        try:
            client.connect(_name(address, port))
            if not _is_of_this_user(client):
                raise _not_rank_0(port)
            secret = client.recv(_SECRET_BYTES)
        except ConnectionRefusedError:
            raise
        except OSError:
            return None
    return secret if len(secret) == _SECRET_BYTES else None


def _name(address: str, port: int) -> str:
    return f"\0instep/{address}:{port}"


def _reply(listener: socket.socket, secret: bytes) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # it was shut down
        with client, suppress(OSError):
            if _is_of_this_user(client):
                client.send(secret)


def _is_of_this_user(client: socket.socket) -> bool:
    """Whether the other process is, as the kernel recorded when it connected or listened."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    return user == os.geteuid() and not _is_overflow_user(user)


def _is_overflow_user(user: int) -> bool:
    """Whether the kernel gives this number to all users that this user namespace does not know."""
    with open("/proc/sys/kernel/overflowuid") as file:
        if user != int(file.read()):
            return False
    with open("/proc/self/uid_map") as file:
        return file.read().split() != ["0", "0", "4294967295"]


def _not_rank_0(port: int) -> AuthenticationError:
    return AuthenticationError(
        "the socket at which rank 0 hands the job's secret to the ranks of this host belongs "
        "to another process: of another user (or of one that this user namespace does not "
        f"know), or of another job with the port {port}. "
        "Nothing of it was used. Give all ranks the same INSTEP_SECRET, or take another port."
    )
