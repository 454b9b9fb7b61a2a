"""The coordinator: a thread on rank 0 that matches the requests of all ranks.

Every rank has a channel (a socket) to it. Every rank gets the responses in the same order. Tensors
do not pass here.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import torch.distributed as dist

from instep.distributed.identity.authentication import derive_key
from instep.distributed.identity.world import World
from instep.distributed.negotiation import connections
from instep.distributed.negotiation.channels import CoordinatorChannel, RankChannel, encode
from instep.distributed.negotiation.errors import NegotiationError
from instep.distributed.negotiation.message_table import MessageTable
from instep.distributed.rendezvous import bootstrap
from instep.process import print_line

SHUTDOWN = None
"""The last message of a rank."""
_END_SECONDS = 5.0
"""How long the coordinator, at its end, waits for ranks to read its last message."""
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many links have been opened, by default process group: the name of the next one in its store.
In an elastic job some of its ranks have been in other groups before."""


@dataclass(frozen=True)
class StallCheck:
    """Seconds after which something happens while some ranks wait for others. None: never."""

    warn_after: float | None = 60.0
    """Until rank 0 prints to stderr which ranks wait for which."""
    shutdown_after: float | None = None
    """Until every rank gets an error."""


@dataclass(frozen=True)
class CoordinatorLink:
    """A rank's channel to the coordinator."""

    channel: RankChannel
    coordinator: threading.Thread | None = None
    """Its thread, if it runs in this process."""

    def close(self) -> None:
        """After the coordinator's last message. On rank 0 the coordinator then ends too."""
        self.channel.close()
        if self.coordinator is not None:
            self.coordinator.join()


def open_link(world: World, stall_check: StallCheck) -> CoordinatorLink:
    """Connect this rank to the coordinator, which starts on rank 0. Collective."""
    group = dist.group.WORLD
    assert group is not None
    number = _opened[group] = _opened.get(group, 0) + 1
    name = f"instep/coordinator/{number}"
    key = derive_key(bootstrap.key(), name)
    if world.rank != 0:
        host, port = json.loads(bootstrap.store().get(name))
        channel = RankChannel(connections.connect_to_rank_0(host, port, world.rank, key))
        return CoordinatorLink(channel)
    ours, theirs = socket.socketpair()
    sockets = [theirs, *_accept_others(world, name, key)]
    coordinator = _Coordinator([CoordinatorChannel(each) for each in sockets], stall_check)
    thread = threading.Thread(target=coordinator.run, name="instep coordinator", daemon=True)
    thread.start()
    return CoordinatorLink(RankChannel(ours), thread)


def _accept_others(world: World, name: str, key: bytes) -> list[socket.socket]:
    """Rank 0 publishes its address in the store, and waits for all other ranks."""
    store = bootstrap.store()
    listener, host = bootstrap.listener()
    with listener:
        store.set(name, json.dumps([host, listener.getsockname()[1]]))
        sockets = connections.accept_ranks(listener, world.size, key)
    store.delete_key(name)
    return sockets


class _Coordinator:
    """Rank 0's thread. It ends when the first rank leaves, and tells all."""

    def __init__(self, channels: Sequence[CoordinatorChannel], stall_check: StallCheck) -> None:
        self._channels = channels
        self._selector = selectors.DefaultSelector()
        for rank, channel in enumerate(channels):
            self._selector.register(channel, selectors.EVENT_READ, rank)
        self._table = MessageTable(len(channels))
        self._stall_check = stall_check

    def run(self) -> None:
        """Respond until a rank leaves or the stall check ends the job."""
        end: NegotiationError | None = None
        while end is None:
            for rank in self._select(self._interval()):
                end = end or self._receive(rank)
            end = end or self._check_stalled()
        encoded = encode(end)
        for rank in range(len(self._channels)):
            self._send(rank, encoded)
        self._wait_until_closed()
        for channel in self._channels:
            channel.close()
        self._selector.close()

    def _select(self, seconds: float | None) -> list[int]:
        """Wait for ranks that have sent something; meanwhile send what is still unsent."""
        readable = []
        for key, events in self._selector.select(seconds):
            rank = key.data
            if events & selectors.EVENT_WRITE:
                self._channels[rank].flush()
                self._set_events(rank)
            if events & selectors.EVENT_READ:
                readable.append(rank)
        return readable

    def _receive(self, rank: int) -> NegotiationError | None:
        try:
            requests = self._channels[rank].receive()
        except (EOFError, OSError):
            requests = [SHUTDOWN]
        for request in requests:
            if request is SHUTDOWN:
                return NegotiationError.rank_left(rank, len(self._channels))
            for response in self._table.add(rank, request, monotonic()):
                encoded = encode(response)
                for member in reversed(response.request.members):  # own process last: it is near
                    self._send(member, encoded)
        return None

    def _send(self, rank: int, encoded: bytes) -> None:
        self._channels[rank].send(encoded)
        self._set_events(rank)

    def _set_events(self, rank: int) -> None:
        """Select for writing, too, where something is unsent."""
        channel = self._channels[rank]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_pending else 0)
        if self._selector.get_key(channel).events != events:
            self._selector.modify(channel, events, rank)

    def _wait_until_closed(self) -> None:
        """A socket closed before it is read empty takes back what the other side has not read."""
        limit = monotonic() + _END_SECONDS
        while self._selector.get_map() and (left := limit - monotonic()) > 0:
            for rank in self._select(left):
                try:
                    self._channels[rank].receive()
                except (EOFError, OSError):
                    self._selector.unregister(self._channels[rank])

    def _interval(self) -> float | None:
        check = self._stall_check
        limits = [s for s in (check.warn_after, check.shutdown_after) if s is not None]
        return min(limits) / 4 if limits and not self._table.is_empty else None

    def _check_stalled(self) -> NegotiationError | None:
        now, check = monotonic(), self._stall_check
        if check.warn_after is not None:
            for stalled in self._table.find_stalled(now, check.warn_after):
                print_line(stalled)
        if check.shutdown_after is not None:
            for stalled in self._table.stalled(now, check.shutdown_after):
                return NegotiationError(f"{stalled} The job asked to end now rather than wait.")
        return None
