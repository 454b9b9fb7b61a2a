"""One rank hears what all are ready for, and tells all what takes place, in one order.

Every rank has a line (a socket) to rank 0, whose coordinator thread keeps the ledger. Tensors do
not pass here.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, Pipe, wait
from time import monotonic

from instep.errors import NegotiationError
from instep.identity.world import World
from instep.meeting import rendezvous
from instep.named.matching import Ledger, Verdict, Wish

LEAVING = None
"""What a rank says last."""
_meetings = 0
"""How often the ranks have met for this: the name of the next meeting in the store."""


@dataclass(frozen=True)
class Patience:
    """What happens while some ranks wait for others. None: never."""

    warn_after: float | None = 60.0
    """Seconds until rank 0 says on stderr who waits for whom."""
    end_after: float | None = None
    """Seconds until every rank gets an error."""


@dataclass(frozen=True)
class Line:
    """What a rank says to the coordinator and hears from it."""

    connection: Connection
    coordinator: threading.Thread | None = None
    """Where it works in this process."""

    def close(self) -> None:
        """Once the end was heard. On rank 0 the coordinator has then ended too."""
        self.connection.close()
        if self.coordinator is not None:
            self.coordinator.join()


def open_line(world: World, patience: Patience) -> Line:
    """This rank's line to the coordinator, which begins its work on rank 0. Collective."""
    global _meetings
    _meetings += 1
    place = f"instep/coordinator/{_meetings}"
    if world.rank != 0:
        host, port, key = json.loads(rendezvous.store().get(place))
        line = _undelayed(Client((host, port), authkey=bytes.fromhex(key)))
        line.send(world.rank)
        return Line(line)
    ours, theirs = Pipe()
    lines = [theirs, *_lines_of_others(world, place)]
    coordinator = _Coordinator(lines, patience)
    thread = threading.Thread(target=coordinator.run, name="instep coordinator", daemon=True)
    thread.start()
    return Line(ours, thread)


def _lines_of_others(world: World, place: str) -> list[Connection]:
    """Rank 0 says in the store where it listens, and waits for all."""
    store, key = rendezvous.store(), secrets.token_bytes(16)
    address = "127.0.0.1" if world.one_host else rendezvous.address_of_rank_0()
    lines: dict[int, Connection] = {}
    with Listener(
        ("127.0.0.1" if world.one_host else "", 0), backlog=world.size, authkey=key
    ) as listener:
        store.set(place, json.dumps([address, listener.address[1], key.hex()]))
        while len(lines) < world.size - 1:
            with suppress(AuthenticationError, EOFError, ConnectionError):  # a stranger
                line = _undelayed(listener.accept())
                lines[line.recv()] = line
    store.delete_key(place)
    return [lines[rank] for rank in range(1, world.size)]


def _undelayed(line: Connection) -> Connection:
    """Each message goes at once (Nagle's algorithm would keep the second for 40 ms)."""
    with socket.socket(fileno=socket.dup(line.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


class _Coordinator:
    """Rank 0's thread. It ends when the first rank leaves, and tells all."""

    def __init__(self, lines: Sequence[Connection], patience: Patience) -> None:
        self._lines = lines
        self._rank_of = {line: rank for rank, line in enumerate(lines)}
        self._ledger = Ledger(len(lines))
        self._patience = patience

    def run(self) -> None:
        """Listen until somebody leaves or the patience ends."""
        end: NegotiationError | None = None
        while end is None:
            for line in wait(self._lines, self._interval()):
                assert isinstance(line, Connection)
                end = end or self._hear(line)
            end = end or self._look_after_delays()
        for line in self._lines:
            with suppress(OSError):
                line.send(end)
            line.close()

    def _hear(self, line: Connection) -> NegotiationError | None:
        rank = self._rank_of[line]
        try:
            said: Wish | None = line.recv()
        except (EOFError, OSError):
            said = LEAVING
        if said is LEAVING:
            return NegotiationError.left(rank, len(self._lines))
        for verdict in self._ledger.hear(rank, said, monotonic()):
            self._tell(verdict)
        return None

    def _tell(self, verdict: Verdict) -> None:
        for rank in reversed(verdict.wish.members):  # this process last, it has the least far to go
            with suppress(OSError):  # it has ended, and its line will say so
                self._lines[rank].send(verdict)

    def _interval(self) -> float | None:
        limits = [s for s in (self._patience.warn_after, self._patience.end_after) if s is not None]
        return min(limits) / 4 if limits and not self._ledger.empty else None

    def _look_after_delays(self) -> NegotiationError | None:
        now = monotonic()
        if self._patience.warn_after is not None:
            for delay in self._ledger.new_delays(now, self._patience.warn_after):
                print(f"instep: {delay}", file=sys.stderr, flush=True)
        if self._patience.end_after is not None:
            for delay in self._ledger.delays(now, self._patience.end_after):
                return NegotiationError.stalled(str(delay))
        return None
