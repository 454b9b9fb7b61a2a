"""Wait for several things at once: lines, process descriptors, and moments."""

from __future__ import annotations

import heapq
import selectors
import socket
import time
from collections.abc import Callable

from instep.distributed.watchdog.connection import Line

Source = int | socket.socket | Line


class Loop:
    """Calls what is to be called, one at a time, until it is told to stop."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._moments: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._goes_on = True

    def on(self, source: Source, react: Callable[[], None]) -> None:
        """Call `react` whenever there is something to read."""
        self._selector.register(source, selectors.EVENT_READ, react)

    def off(self, source: Source) -> None:
        """Not any more."""
        self._selector.unregister(source)

    def after(self, seconds: float, react: Callable[[], None]) -> None:
        """Call `react` once, in so many seconds."""
        self._count += 1
        heapq.heappush(self._moments, (time.monotonic() + seconds, self._count, react))

    def run(self) -> None:
        """Return when `stop` was called."""
        while self._goes_on:
            wait = self._moments[0][0] - time.monotonic() if self._moments else None
            for key, _ in self._selector.select(wait):
                key.data()
            while self._moments and self._moments[0][0] <= time.monotonic():
                heapq.heappop(self._moments)[2]()

    def stop(self) -> None:
        """End `run`, as soon as what it calls now has returned."""
        self._goes_on = False
