"""In the watcher of another host than rank 0's: `instep where` asks the hub through it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from instep.distributed.watchdog.connection import Connection, Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.stalls.job_socket import JobSocket


class RequestRelay:
    """A job's socket on this host; questions go to the hub, and its answers come back."""

    def __init__(self, loop: EventLoop, hub: Connection, rank_pid: int) -> None:
        self._hub = hub
        self._replies: dict[int, Callable[[str], None]] = {}
        """By the number of the question."""
        self._number = 0
        self._socket: JobSocket | None = None
        with suppress(OSError):
            self._socket = JobSocket(loop, rank_pid, self._ask)

    def _ask(self, question: Message, reply: Callable[[str], None]) -> None:
        self._number += 1
        self._replies[self._number] = reply
        self._hub.send("question", number=self._number, kind=question["type"])

    def handle_reply(self, message: Message) -> None:
        """The hub has answered."""
        reply = self._replies.pop(message["number"], None)
        if reply is not None:
            reply(message["text"])

    def close(self) -> None:
        """The rank has ended."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
