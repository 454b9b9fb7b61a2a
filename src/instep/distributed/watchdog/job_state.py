"""What the hub knows of the ranks of its job, and its messages to their watchers."""

from __future__ import annotations

from collections.abc import Set

from instep.distributed.watchdog.connection import Connection, Message, encode


class JobState:
    """The connections to the watchers, and which ranks have finished, failed or ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.connections: dict[int, Connection] = {}
        self.hosts: set[str] = set()
        self.finished: set[int] = set()
        """The ranks whose program has ended normally."""
        self.ended: dict[int, int | None] = {}
        """The exit codes of the ranks that have ended."""
        self.failures: list[Message] = []
        """In the order of their arrival."""
        self.failing_alike: set[int] = set()
        """The ranks that have failed in the same way as rank 0, which reports it."""
        self.first_failure: Message | None = None
        """The failure that is reported, once it is chosen."""

    def send(self, rank: int, message_type: str, **fields: object) -> None:
        """Send a message to the watcher of this rank, if it is connected."""
        if rank in self.connections:
            self.connections[rank].send(message_type, **fields)

    def broadcast(self, message_type: str, **fields: object) -> None:
        """Send a message to every watcher."""
        line = encode(message_type, **fields)
        for connection in self.connections.values():
            connection.send_line(line)

    def running_ranks(self) -> set[int]:
        """The connected ranks whose programs have not ended."""
        return self.connections.keys() - self.ended.keys() - self.finished

    def connected_ranks(self) -> Set[int]:
        """The ranks whose watchers are connected; a view."""
        return self.connections.keys()

    def is_ending(self) -> bool:
        """Whether a rank has failed, or has ended."""
        return bool(self.failures or self.ended)

    def is_incomplete(self) -> bool:
        """Whether a rank has failed, or its program has ended."""
        return self.is_ending() or bool(self.finished)

    def all_connected(self) -> bool:
        """Whether every rank has connected, or has ended."""
        return len(self.connections.keys() | self.ended.keys()) == self.size

    def abort_job(self, text: str) -> None:
        """Let the lowest running rank fail with this text, unless a failure is known already."""
        if not self.failures:
            self.send(min(self.running_ranks(), default=0), "abort", text=text)
