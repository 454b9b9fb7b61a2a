"""Callbacks for connections, process descriptors and timers."""

from __future__ import annotations

import heapq
import selectors
import socket
import time
from collections.abc import Callable

from instep.distributed.watchdog.connection import Connection

Source = int | socket.socket | Connection


class EventLoop:
    """Calls callbacks, one at a time, until it is stopped. The methods are named as asyncio's."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._running = True

    def add_reader(self, source: Source, callback: Callable[[], None]) -> None:
        """Call `callback` whenever there is something to read."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def remove_reader(self, source: Source) -> None:
        """Stop calling it."""
        self._selector.unregister(source)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` once, after that many seconds."""
        self._count += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._count, callback))

    def run(self) -> None:
        """Return after `stop`."""
        while self._running:
            wait = self._timers[0][0] - time.monotonic() if self._timers else None
            for key, _ in self._selector.select(wait):
                key.data()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def stop(self) -> None:
        """End `run` when the current callback has returned."""
        self._running = False
