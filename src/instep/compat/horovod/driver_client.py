"""In a rank of an elastic job: its connection to the driver, which chooses the next world."""

from __future__ import annotations

import functools
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from instep.distributed.identity.launchers import ELASTIC_FD, STORE_FD
from instep.distributed.rendezvous import listening, port_file
from instep.distributed.watchdog.connection import Connection, Message

RENDEZVOUS_SECONDS = 30
"""For the ranks of a new world to meet: all of them are ready when they begin."""
Listener = Callable[[int, int], None]
"""Is called with a number that grows, and REMOVED, ADDED or both."""
REMOVED, ADDED = 1, 2


def is_elastic() -> bool:
    """Whether `instep horovodrun` started this rank in a job whose ranks may change."""
    return ELASTIC_FD in os.environ


def connect() -> DriverClient | None:
    """This process's connection, which is made once; None where the job is not elastic."""
    return _connect(int(os.environ[ELASTIC_FD])) if is_elastic() else None


@functools.cache
def _connect(fd: int) -> DriverClient:
    os.set_inheritable(fd, False)
    return DriverClient(socket.socket(fileno=fd))


class DriverClient:
    """This rank's end of the connection; a thread reads from it."""

    def __init__(self, sock: socket.socket) -> None:
        self._connection = Connection(sock)
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._update: tuple[int, int] | None = None
        """The last change of the hosts in this world."""
        threading.Thread(target=self._listen, name="instep driver client", daemon=True).start()

    def join(self) -> None:
        """Wait for the next world, and put this rank's numbers there into the environment.

        Raises SystemExit if this rank is not needed there.
        """
        with listening.bind(port_file.LOOPBACK_HOST) as listener:
            self._connection.send("join", port=listener.getsockname()[1])
            answer = self._answers.get()
            if answer["type"] != "world":
                sys.exit(answer.get("code", 0))
            os.environ.update(answer["variables"])
            os.environ.pop(STORE_FD, None)
            if os.environ["RANK"] == "0":
                os.environ[STORE_FD] = str(listener.detach())

    def add_listener(self, listener: Listener) -> None:
        """Call it for each change of the hosts, also for the last one in this world so far."""
        with self._lock:
            self._listeners.append(listener)
            if self._update is not None:
                listener(*self._update)

    def remove_listener(self, listener: Listener) -> None:
        """Do not call it any more."""
        with self._lock, suppress(ValueError):
            self._listeners.remove(listener)

    def _listen(self) -> None:
        """The thread: hand on what the driver sends, until it ends."""
        while messages := self._connection.recv():
            for message in messages:
                if message["type"] == "hosts":
                    change = REMOVED * message["removed"] | ADDED * message["added"]
                    self._report(message["time"], change)
                else:
                    with self._lock:
                        self._update = None
                    self._answers.put(message)
        self._answers.put({"type": "leave", "code": 1})

    def _report(self, time: int, change: int) -> None:
        with self._lock:
            self._update = time, change
            for listener in self._listeners:
                listener(time, change)
