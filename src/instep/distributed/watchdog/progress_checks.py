"""In the watcher: whether its rank goes on, waits in a collective, or waits in vain."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from instep.distributed.conditions import advise_on_condition
from instep.distributed.watchdog.connection import Connection, Message
from instep.distributed.watchdog.delay_check import IDLE_TICKS
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.stalls.probe import is_stopped
from instep.distributed.watchdog.stalls.rank_watch import RankWatch
from instep.process.exit_status import format_ranks, ranks_of
from instep.process.procfs import context_switches, descendants, kill, read_stat

CHECK_SECONDS, FREQUENT_CHECK_SECONDS = 2.5, 0.3
"""Between two checks of the rank; the second once any rank has come to its end."""


class ProgressChecks:
    """Looks at the rank every few seconds and tells the hub that it waits or goes on.

    `abort` is called with an error and the rank that has ended where this one waits for it; it
    returns False if this one is to end anyway.
    """

    def __init__(
        self,
        loop: EventLoop,
        rank: Connection,
        hub: Connection,
        start: Message,
        stalls: RankWatch,
        abort: Callable[[str, int], bool],
    ) -> None:
        self._loop, self._rank_connection, self._hub = loop, rank, hub
        self._rank, self._pid = start["rank"], start["pid"]
        self._stalls, self._abort = stalls, abort
        self._ended = False
        """Whether the rank's process has ended."""
        self._interval = CHECK_SECONDS
        self._ended_ranks: set[int] = set()
        self._children: dict[int, int] = {}
        """The process descriptors of the rank's child processes, such as loader workers."""
        self._activity = (0, 0)
        self._was_stopped = False
        """Whether a signal had stopped the rank at the last check."""
        self._asleep = self._idle = False
        """Since the last check: the main thread did not run; all threads hardly ran."""
        self._sequence: int | None = None
        """The sequence number of its barrier in shared memory at the last check."""
        self._idle_checks, self._awaited_checks, self._wait_sent = 0, 0, False
        """Checks for which it has been idle in a collective, and for which it has waited for a rank
        that has ended; whether the hub knows that it waits."""
        loop.call_later(self._interval, partial(self._check_every, self._interval))

    def rank_ended(self) -> None:
        """The rank's process has ended: there is nothing to look at any more."""
        self._ended = True

    def kill_children(self) -> None:
        """Kill the rank's child processes: a loader worker would check only every five seconds
        whether its rank has ended."""
        for pidfd in self._children.values():
            kill(pidfd)

    def add_ended_ranks(self, ranks: set[int]) -> None:
        """Note that these ranks have ended; the rank may wait for one of them."""
        self._ended_ranks |= ranks
        self.shorten_interval()

    def shorten_interval(self) -> None:
        """A rank has come to its end: check more often from now on."""
        if self._interval != FREQUENT_CHECK_SECONDS:
            self._interval = FREQUENT_CHECK_SECONDS
            self._loop.call_later(self._interval, partial(self._check_every, self._interval))

    def _check_every(self, seconds: float) -> None:
        """Check so often until the rank ends, or the interval becomes shorter."""
        if not self._ended and seconds == self._interval:
            self._check()
            self._loop.call_later(seconds, partial(self._check_every, seconds))

    def _check(self) -> None:
        """Compare the rank's activity with that at the last check; ask for its position.

        A stopped rank does not wait: while it is, and until the check after, it is not asked.
        """
        was_stopped, self._was_stopped = self._was_stopped, is_stopped(self._pid)
        if self._was_stopped:
            self._goes_on()
            return
        with suppress(OSError):
            switches, ticks = context_switches(self._pid), read_stat(self._pid).cpu_ticks
            self._asleep = switches == self._activity[0]
            self._idle = ticks - self._activity[1] <= IDLE_TICKS
            if not was_stopped:
                self._rank_connection.send("get_position")
            self._activity = switches, ticks
            self._open_children()

    def _open_children(self) -> None:
        for pid in descendants(self._pid) - self._children.keys():
            with suppress(OSError):
                self._children[pid] = os.pidfd_open(pid)

    def add_position(self, wait: Message | None) -> None:
        """The rank's reply: the collective in which its main thread is, or None."""
        previous, self._sequence = self._sequence, None if wait is None else wait.get("sequence")
        waits = self._asleep or (self._idle and previous == self._sequence is not None)
        self._stalls.set_wait(wait["line"] if wait is not None and waits else None)
        if wait is None or not waits:
            self._goes_on()
            return
        self._idle_checks = self._idle_checks + 1 if self._idle else 0
        awaited = sorted(self._ended_ranks & ranks_of(wait["members"])) if self._ended_ranks else []
        self._awaited_checks = self._awaited_checks + 1 if awaited else 0
        if self._awaited_checks == 2 and self._abort(
            f"rank {self._rank} waits in {wait['call']} at {wait['line']} for "
            f"{format_ranks(awaited)}, which {'has' if len(awaited) == 1 else 'have'} ended."
            + advise_on_condition([f" at {wait['line']}"]),
            awaited[0],
        ):
            return
        if self._idle_checks >= 2 and not self._wait_sent:
            self._wait_sent = True
            self._hub.send("waits", **wait)

    def _goes_on(self) -> None:
        self._idle_checks = self._awaited_checks = 0
        if self._wait_sent:
            self._wait_sent = False
            self._hub.send("resumed")
