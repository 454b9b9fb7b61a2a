"""One rank hears what all are ready for, and tells all what takes place, in one order.

Every rank has a line (a socket) to rank 0, whose coordinator thread keeps the ledger. Tensors do
not pass here.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from instep.distributed.identity.authentication import derive_key
from instep.distributed.identity.world import World
from instep.distributed.negotiation import connections
from instep.distributed.negotiation.channels import CoordinatorChannel, RankChannel
from instep.distributed.negotiation.errors import NegotiationError
from instep.distributed.negotiation.message_table import MessageTable, Response
from instep.distributed.rendezvous import bootstrap

SHUTDOWN = None
"""What a rank says last."""
_END_SECONDS = 5.0
"""How long the coordinator, at its end, waits for ranks to hear of it."""
_meetings = 0
"""How often the ranks have met for this: the name of the next meeting in the store."""


@dataclass(frozen=True)
class StallCheck:
    """What happens while some ranks wait for others. None: never."""

    warn_after: float | None = 60.0
    """Seconds until rank 0 says on stderr who waits for whom."""
    end_after: float | None = None
    """Seconds until every rank gets an error."""


@dataclass(frozen=True)
class CoordinatorLink:
    """What a rank says to the coordinator and hears from it."""

    end: RankChannel
    coordinator: threading.Thread | None = None
    """Where it works in this process."""

    def close(self) -> None:
        """Once the end was heard. On rank 0 the coordinator then ends too."""
        self.end.close()
        if self.coordinator is not None:
            self.coordinator.join()


def open_link(world: World, patience: StallCheck) -> CoordinatorLink:
    """This rank's line to the coordinator, which begins its work on rank 0. Collective."""
    global _meetings
    _meetings += 1
    place = f"instep/coordinator/{_meetings}"
    key = derive_key(bootstrap.key(), place)
    if world.rank != 0:
        host, port = json.loads(bootstrap.store().get(place))
        return CoordinatorLink(
            RankChannel(connections.connect_to_rank_0(host, port, world.rank, key))
        )
    ours, theirs = socket.socketpair()
    sockets = [theirs, *_sockets_of_others(world, place, key)]
    coordinator = _Coordinator([CoordinatorChannel(each) for each in sockets], patience)
    thread = threading.Thread(target=coordinator.run, name="instep coordinator", daemon=True)
    thread.start()
    return CoordinatorLink(RankChannel(ours), thread)


def _sockets_of_others(world: World, place: str, key: bytes) -> list[socket.socket]:
    """Rank 0 says in the store where it listens, and waits for all."""
    store = bootstrap.store()
    listener, host = bootstrap.listener()
    with listener:
        store.set(place, json.dumps([host, listener.getsockname()[1]]))
        sockets = connections.accept_ranks(listener, world.size, key)
    store.delete_key(place)
    return sockets


class _Coordinator:
    """Rank 0's thread. It ends when the first rank leaves, and tells all."""

    def __init__(self, lines: Sequence[CoordinatorChannel], patience: StallCheck) -> None:
        self._lines = lines
        self._selector = selectors.DefaultSelector()
        for rank, line in enumerate(lines):
            self._selector.register(line, selectors.EVENT_READ, rank)
        self._ledger = MessageTable(len(lines))
        self._patience = patience

    def run(self) -> None:
        """Listen until somebody leaves or the patience ends."""
        end: NegotiationError | None = None
        while end is None:
            for rank in self._ready(self._interval()):
                end = end or self._hear(rank)
            end = end or self._look_after_delays()
        for rank in range(len(self._lines)):
            self._send(rank, end)
        self._wait_until_all_have_hung_up()
        for line in self._lines:
            line.close()
        self._selector.close()

    def _ready(self, seconds: float | None) -> list[int]:
        """Wait for ranks that have said something; meanwhile send what has not gone yet."""
        heard = []
        for key, events in self._selector.select(seconds):
            rank = key.data
            if events & selectors.EVENT_WRITE:
                self._lines[rank].flush()
                self._select(rank)
            if events & selectors.EVENT_READ:
                heard.append(rank)
        return heard

    def _hear(self, rank: int) -> NegotiationError | None:
        try:
            wishes = self._lines[rank].receive()
        except (EOFError, OSError):
            wishes = [SHUTDOWN]
        for wish in wishes:
            if wish is SHUTDOWN:
                return NegotiationError.rank_left(rank, len(self._lines))
            for verdict in self._ledger.hear(rank, wish, monotonic()):
                self._tell(verdict)
        return None

    def _tell(self, verdict: Response) -> None:
        for rank in reversed(verdict.wish.members):  # this process last, it has the least far to go
            self._send(rank, verdict)

    def _send(self, rank: int, what: Response | NegotiationError) -> None:
        self._lines[rank].send(what)
        self._select(rank)

    def _select(self, rank: int) -> None:
        """Wake when there is room, too, where something has not gone yet."""
        line = self._lines[rank]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.has_unsent else 0)
        if self._selector.get_key(line).events != events:
            self._selector.modify(line, events, rank)

    def _wait_until_all_have_hung_up(self) -> None:
        """A socket closed before it is read empty takes back what the other side has not read."""
        limit = monotonic() + _END_SECONDS
        while self._selector.get_map() and (left := limit - monotonic()) > 0:
            for rank in self._ready(left):
                try:
                    self._lines[rank].receive()
                except (EOFError, OSError):
                    self._selector.unregister(self._lines[rank])

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
                return NegotiationError(f"{delay} The job asked to end now rather than wait.")
        return None
