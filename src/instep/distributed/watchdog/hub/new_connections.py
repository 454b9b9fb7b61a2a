"""New connections to the hub, which say whose they are before anything else is read from them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hmac import compare_digest

from instep.distributed.watchdog.connection import Connection, Message, accept
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.job_state import JobState
from instep.distributed.watchdog.messages import is_valid

HELLO_SECONDS = 5.0
"""Within which a new connection must identify itself."""
MAX_STRANGERS = 64
"""Unidentified connections beside those of ranks that are to come; then the oldest is closed."""

OnHello = Callable[[Connection, list[Message]], None]
"""Called with the connection of a watcher of this job, and its first messages, the hello and
perhaps more."""


class NewConnections:
    """Accepts connections, and closes those that do not prove to be of this job."""

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        token: str,
        job: JobState,
        on_hello: OnHello,
    ) -> None:
        self._loop, self._listener, self._token = loop, listener, token
        self._job, self._on_hello = job, on_hello
        self._unidentified: dict[Connection, None] = {}
        """Oldest first."""
        listener.setblocking(False)
        loop.add_reader(listener, self._accept)

    def add(self, sock: socket.socket) -> None:
        """Wait for the hello of a new connection, which may be a watcher's or a stranger's."""
        connection = Connection(sock)
        self._unidentified[connection] = None
        self._loop.add_reader(connection, partial(self._recv_hello, connection))
        self._loop.call_later(HELLO_SECONDS, partial(self._reject, connection))
        still_to_come = self._job.size - len(self._job.connections)
        if len(self._unidentified) > MAX_STRANGERS + still_to_come:
            self._reject(next(iter(self._unidentified)))

    def _accept(self) -> None:
        with suppress(OSError):  # the peer has closed its end again
            self.add(accept(self._listener))

    def _reject(self, connection: Connection) -> None:
        """Close a connection unless it has identified itself."""
        if connection in self._unidentified:
            del self._unidentified[connection]
            self._loop.remove_reader(connection)
            connection.close()

    def _recv_hello(self, connection: Connection) -> None:
        try:
            messages = connection.recv()
        except OSError:
            messages = None
        if messages == []:
            return  # it is incomplete
        if messages is None or not self._is_hello(messages[0]):
            self._reject(connection)
            return
        del self._unidentified[connection]
        self._loop.remove_reader(connection)
        self._on_hello(connection, messages)

    def _is_hello(self, message: Message) -> bool:
        """Whether it is from a watcher of this job, whose rank is not connected yet."""
        return (
            message["type"] == "hello"
            and is_valid(message, self._job.size)
            and compare_digest(message["token"].encode(errors="replace"), self._token.encode())
            and message["rank"] not in self._job.connections
        )
