"""The socket at which the hub answers questions about its job, and its client.

It is an abstract Unix socket, of which no file is left behind. The kernel tells each side the
user of the other; only processes of the same user are answered, and believed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from instep.distributed.watchdog.connection import Connection, Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.process.procfs import CREDENTIALS, read_environ, read_stat

_PREFIX = "instep-job"
Answer = Callable[[Message, Callable[[str], None]], None]
"""Answers a question by calling the second argument with a text, now or later."""


class JobAddress(NamedTuple):
    """A job of this user on this host, by its hub."""

    pid: int
    """Of rank 0."""
    name: str
    """Of the socket."""


class JobSocket:
    """The hub's end."""

    def __init__(self, loop: EventLoop, rank_pid: int, answer: Answer) -> None:
        self._loop, self._answer = loop, answer
        self._connections: set[Connection] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{_PREFIX}/{os.getuid()}/{rank_pid}/{os.getpid()}")
        self._listener.listen()
        loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Close it, and every connection."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._loop.remove_reader(connection)
        connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            sock = self._listener.accept()[0]
            if _peer_user(sock) != os.getuid():
                sock.close()
                return
            sock.setblocking(True)
            sock.settimeout(1.0)
            connection = Connection(sock)
            self._connections.add(connection)
            self._loop.add_reader(connection, partial(self._recv, connection))

    def _recv(self, connection: Connection) -> None:
        try:
            messages = connection.recv()
        except OSError:
            messages = None
        if messages is None:
            self._drop(connection)
        for message in messages or ():
            self._answer(message, partial(_send_text, connection))


def _send_text(connection: Connection, text: str) -> None:
    connection.send("answer", text=text)


def request(address: JobAddress, question: str, timeout: float = 10.0) -> str | None:
    """The job's answer; None where it does not answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(timeout)
        try:
            sock.connect("\0" + address.name)
            if _peer_user(sock) != os.getuid():
                return None
            connection = Connection(sock)
            connection.send(question)
            while (messages := connection.recv()) is not None:
                for message in messages:
                    return str(message.get("text"))
        except OSError:
            return None
    return None


def find_jobs() -> list[JobAddress]:
    """The jobs of this user on this host, by the process id of rank 0."""
    prefix = f"@{_PREFIX}/{os.getuid()}/"
    found: dict[int, JobAddress] = {}
    with open("/proc/net/unix") as file:
        names = {line.split()[-1] for line in file if prefix in line}
    for name in sorted(names):
        pid, _, watcher = name.removeprefix(prefix).partition("/")
        if pid.isdigit() and watcher.isdigit():
            found[int(pid)] = JobAddress(int(pid), name[1:])
    return [found[pid] for pid in sorted(found)]


def is_of_job(address: JobAddress, wanted: str) -> bool:
    """Whether `wanted` is the job's name (INSTEP_JOB), or the id of rank 0, of a process above it
    (such as `instep run`), or of another process of the job."""
    job = _job_name(address.pid)
    if wanted == job:
        return True
    if not wanted.isdigit():
        return False
    return int(wanted) in _ancestors(address.pid) or (bool(job) and _job_name(int(wanted)) == job)


def _job_name(pid: int) -> str:
    with suppress(OSError):
        return read_environ(pid).get("INSTEP_JOB", "")
    return ""


def _ancestors(pid: int) -> set[int]:
    """A process and those above it, without init and the shell's session leaders' parents."""
    found = set()
    with suppress(OSError):
        while pid > 1:
            found.add(pid)
            pid = read_stat(pid).parent
    return found


def _peer_user(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(credentials)[1])
