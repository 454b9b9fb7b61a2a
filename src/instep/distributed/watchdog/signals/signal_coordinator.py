"""In the hub: the choice of the point of the program at which a signal takes effect."""

from __future__ import annotations

import signal

from instep.distributed.watchdog.connection import Connection, Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.job_state import JobState
from instep.process.exit_status import format_ranks

POLL_SECONDS = 0.25
"""Between two requests for the progress of the ranks."""
POLL_SECONDS_PER_RANK = 100e-6
"""The hub takes a third of it to ask a rank and to read the answer."""
SAME_LINE_POLLS, NO_COLLECTIVE_POLLS = 2, 8
"""Ranks that have entered the same number of collectives are interrupted where they are, if they
are at the same line for so many polls, or if none enters another collective for so many."""
UNCONNECTED_POLLS = 16
"""Polls for which the hub waits for ranks that have not connected; then all are interrupted where
they are."""
STALLED_POLLS, STALLED_NOW_POLLS = 40, 120
"""Polls without progress of any rank after which the job is aborted; the second number once the
ranks may be interrupted where they are."""


class SignalCoordinator:
    """The signals that have come to this job."""

    def __init__(self, loop: EventLoop, job: JobState) -> None:
        self._loop, self._job = loop, job
        self._signals: dict[int, JobSignal] = {}

    def add_rank(self, rank: int, connection: Connection) -> None:
        """A rank has connected, perhaps after the others were interrupted."""
        for each in self._signals.values():
            each.add_rank(rank, connection)

    def handle(self, rank: int, message_type: str, message: Message) -> None:
        """Handle a message of a rank; other messages are ignored."""
        number = message.get("signal")
        if number is None:
            return
        known = self._signals.get(number)
        if known is None or (known.is_over and message_type == "interrupt"):
            known = JobSignal(self._loop, self._job, number)
            self._signals[number] = known
        known.handle(rank, message_type, message)


class JobSignal:
    """One signal, from the first rank that reports it until it has taken effect on all.

    Ctrl-C ends a job whose ranks come to no common point. Another signal takes effect where they
    are then, and so it does once a rank has failed: the others may have a second left to save.
    """

    def __init__(self, loop: EventLoop, job: JobState, number: int = signal.SIGINT) -> None:
        self._loop, self._job, self._number = loop, job, number
        self.is_over = False
        """Whether it has taken effect on all ranks that run."""
        self._requested = self._target_sent = self._now = self._aborted = False
        """A rank was interrupted; all know the collective; all may be interrupted at once."""
        self._anywhere = False
        """Whether all may be interrupted inside of torch, too."""
        self._awaited: set[int] = set()
        """The ranks that ran when it began, and have not paused."""
        self._poll_seconds = POLL_SECONDS
        self._counts: dict[int, int] = {}
        """The number of collectives that each rank has entered."""
        self._lines: dict[int, str] = {}
        self._interrupted: dict[int, str] = {}
        """The line at which it took effect."""
        self._last: tuple[object, object] = ({}, {})
        self._same_line = self._no_collective = self._unconnected = 0
        """Polls for which the ranks have been at the same line, have entered no collective, or have
        not all been connected."""

    def add_rank(self, rank: int, connection: Connection) -> None:
        """A rank has connected, perhaps after the others were interrupted."""
        if self._now:
            connection.send("interrupt_now", signal=self._number, anywhere=self._anywhere)
        elif self._requested and not self.is_over:
            self._awaited.add(rank)
            connection.send("pause", signal=self._number)

    def handle(self, rank: int, message_type: str, message: Message) -> None:
        """Handle a message of a rank; other messages are ignored."""
        if message_type == "interrupt":
            self._start()
        elif message_type == "paused":
            self._counts[rank] = message["count"]
            self._awaited.discard(rank)
            if not self._awaited:
                self._choose_target()
        elif message_type == "progress":
            self._counts[rank], self._lines[rank] = message["count"], message["line"]
        elif message_type == "interrupted":
            self._interrupted[rank] = message["line"]

    def _broadcast(self, message_type: str, **fields: object) -> None:
        self._job.broadcast(message_type, signal=self._number, **fields)

    def _is_ending(self) -> bool:
        """Whether the job is about to end, not by a Ctrl-C."""
        return self._number != signal.SIGINT and self._job.is_incomplete()

    def _start(self) -> None:
        if not self._requested:
            self._requested = True
            self._awaited = self._job.running_ranks()
            self._poll_seconds = max(POLL_SECONDS, POLL_SECONDS_PER_RANK * len(self._awaited))
            self._broadcast("pause")
            if self._is_ending():
                self._interrupt_now()
            self._loop.call_later(self._poll_seconds, self._poll)

    def _choose_target(self) -> None:
        """Send the collective at which all stop, once all ranks that run have paused."""
        paused = self._job.all_connected() and self._job.running_ranks() <= self._counts.keys()
        if paused and not self._target_sent:
            self._target_sent = True
            self._broadcast("interrupt_at", count=max(self._counts.values()) + 1)

    def _interrupt_now(self) -> None:
        self._now = True
        self._anywhere = self._is_ending()
        self._no_collective = 0
        self._broadcast("interrupt_now", anywhere=self._anywhere)

    def _poll(self) -> None:
        left = self._job.running_ranks() - self._interrupted.keys()
        if not left:
            self.is_over = True
            return
        self._check_progress(left)
        self._awaited &= left
        if not self._awaited and not self._now:  # those that had not paused have ended
            self._choose_target()
        self._broadcast("get_progress")
        self._loop.call_later(self._poll_seconds, self._poll)

    def _check_progress(self, left: set[int]) -> None:
        now = dict(self._counts), dict(self._lines)
        places = {(self._counts.get(rank), self._lines.get(rank)) for rank in left}
        self._no_collective = self._no_collective + 1 if now[0] == self._last[0] else 0
        self._same_line = self._same_line + 1 if now == self._last and len(places) == 1 else 0
        self._last = now
        level = len({self._counts.get(rank) for rank in self._job.running_ranks()}) == 1
        waiting = not self._now and not self._interrupted and self._target_sent and level
        self._unconnected += not self._job.all_connected()
        stalled = self._no_collective >= (STALLED_NOW_POLLS if self._now else STALLED_POLLS)
        idle = self._same_line >= SAME_LINE_POLLS or self._no_collective >= NO_COLLECTIVE_POLLS
        some_never_came = not self._now and self._unconnected >= UNCONNECTED_POLLS
        in_vain = not self._now and self._number != signal.SIGINT and stalled
        ends = self._is_ending() and not self._anywhere
        if (waiting and idle) or some_never_came or in_vain or ends:
            self._interrupt_now()
        elif stalled and not self._aborted and self._number == signal.SIGINT:
            self._aborted = True
            lines = "\n".join(f"  rank {r} is at {self._lines.get(r, '?')}" for r in sorted(left))
            self._job.abort_job(
                f"interrupted, and {format_ranks(left)} did not come to a point at which all ranks "
                f"can be interrupted:\n{lines}"
            )
