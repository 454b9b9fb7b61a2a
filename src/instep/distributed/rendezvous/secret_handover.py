"""Rank 0 hands the job's secret to ranks of its own host, which need no more for it than a port.

They meet at a Unix socket in the abstract namespace: no folder is needed, it is there for the
processes of one network namespace, and it goes with the process that holds it. Any user may listen
or call there; so each side asks the kernel whose process the other one is.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

from instep.distributed.errors import AuthenticationError

_CREDENTIALS = struct.Struct("iII")
"""`struct ucred`: process, user, group."""
_ANSWERS = 1.0
"""Seconds within which rank 0 answers, or is asked again."""
_SECRET_BYTES = 32


@contextmanager
def hand_over(address: str, port: int, secret: bytes) -> Iterator[None]:
    """Tell this user's processes the `secret` for a while; they know `address` and `port`.

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
        answering = Thread(target=_answer, args=(listener, secret), daemon=True)
        answering.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread; to close does not
            answering.join()


def request_secret(address: str, port: int) -> bytes | None:
    """What rank 0 tells; None where it has not answered, and may when it is asked again.

    Raises ConnectionRefusedError where nobody listens, and AuthenticationError where the process
    that listens is another user's.
    """
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_ANSWERS)
        try:
            line.connect(_name(address, port))
            if not _is_of_this_user(line):
                raise _not_rank_0(port)
            told = line.recv(_SECRET_BYTES)
        except ConnectionRefusedError:
            raise
        except OSError:
            return None
    return told if len(told) == _SECRET_BYTES else None


def _name(address: str, port: int) -> str:
    return f"\0instep/{address}:{port}"


def _answer(listener: socket.socket, secret: bytes) -> None:
    while True:
        try:
            line, _ = listener.accept()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # it was shut down
        with line, suppress(OSError):
            if _is_of_this_user(line):
                line.send(secret)


def _is_of_this_user(line: socket.socket) -> bool:
    """Whether the process at the other end is, as the kernel noted when it called or listened."""
    told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return user == os.geteuid() and not _may_be_anybody(user)


def _may_be_anybody(user: int) -> bool:
    """Whether the kernel gives this number to all users whom this user namespace does not know."""
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
