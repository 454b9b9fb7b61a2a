"""In the watcher: whether its rank is late, so that the hub compares the ranks' collectives."""

from __future__ import annotations

from contextlib import suppress

from instep.distributed.flight_record.record_format import read_wait
from instep.distributed.watchdog.connection import Connection, Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.process.procfs import read_stat

LATE_SECONDS = 1.0
"""For which a rank waits in a collective until the hub compares what the ranks have entered."""
IDLE_TICKS = 3
"""Clock ticks between two checks that are no work: Gloo's threads wake a hundred times a second."""


class DelayCheck:
    """Tells the hub that the rank has waited for LATE_SECONDS in a collective, or has slept.

    It may sleep in a group of torch's own, of whose calls the flight record has none.
    """

    def __init__(self, loop: EventLoop, hub: Connection, start: Message) -> None:
        self._loop, self._hub = loop, hub
        self._pid = start["pid"]
        self._record_file: int = start["record"]
        """For `record_format.read_wait`."""
        self._ended = False
        """Whether the rank's process has ended."""
        self._ticks, self._is_idle = 0, False
        """The rank's processor time; whether it has hardly run for LATE_SECONDS."""
        self._reported = 0
        """The number, in the flight record, of the last collective that was reported to be late."""
        loop.call_later(LATE_SECONDS, self._check)

    def rank_ended(self) -> None:
        """The rank's process has ended: there is nothing to look at any more."""
        self._ended = True

    def _check(self) -> None:
        if self._ended:
            return
        with suppress(OSError):
            before, self._ticks = self._ticks, read_stat(self._pid).cpu_ticks
            was_idle, self._is_idle = self._is_idle, self._ticks - before <= IDLE_TICKS
            if self._is_idle and not was_idle:
                self._hub.send("is_late")
        entry = read_wait(self._record_file)
        if entry is not None and entry.has_waited(self._reported, LATE_SECONDS):
            self._reported = entry.number
            self._hub.send("is_late")
        self._loop.call_later(LATE_SECONDS, self._check)
