"""In the hub: the choice of the point of the program at which a Ctrl-C takes effect."""

from __future__ import annotations

from typing import Protocol

from instep.distributed.watchdog.connection import Connection, Message
from instep.distributed.watchdog.event_loop import EventLoop
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


class JobControl(Protocol):
    """The part of the hub that is used here."""

    def broadcast(self, message_type: str, **fields: object) -> None:
        """Send a message to every rank."""

    def running_ranks(self) -> set[int]:
        """The ranks whose programs have not ended."""

    def all_connected(self) -> bool:
        """Whether every rank has connected."""

    def abort_job(self, text: str) -> None:
        """End the job."""


class InterruptCoordinator:
    """One Ctrl-C, from the first rank that reports it until it has taken effect on all."""

    def __init__(self, loop: EventLoop, job: JobControl) -> None:
        self._loop, self._job = loop, job
        self._requested = self._target_sent = self._now = self._aborted = False
        """A rank was interrupted; all know the collective; all may be interrupted at once."""
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
            connection.send("interrupt_now")
        elif self._requested:
            self._awaited.add(rank)
            connection.send("pause")

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

    def _start(self) -> None:
        if not self._requested:
            self._requested = True
            self._awaited = self._job.running_ranks()
            self._poll_seconds = max(POLL_SECONDS, POLL_SECONDS_PER_RANK * len(self._awaited))
            self._job.broadcast("pause")
            self._loop.call_later(self._poll_seconds, self._poll)

    def _choose_target(self) -> None:
        """Send the collective at which all stop, once all ranks that run have paused."""
        paused = self._job.all_connected() and self._job.running_ranks() <= self._counts.keys()
        if paused and not self._target_sent:
            self._target_sent = True
            self._job.broadcast("interrupt_at", count=max(self._counts.values()) + 1)

    def _interrupt_now(self) -> None:
        self._now = True
        self._no_collective = 0
        self._job.broadcast("interrupt_now")

    def _poll(self) -> None:
        left = self._job.running_ranks() - self._interrupted.keys()
        if not left:
            return
        self._check_progress(left)
        self._awaited &= left
        if not self._awaited and not self._now:  # those that had not paused have ended
            self._choose_target()
        self._job.broadcast("get_progress")
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
        if (waiting and idle) or some_never_came:
            self._interrupt_now()
        elif stalled and not self._aborted:
            self._aborted = True
            lines = "\n".join(f"  rank {r} is at {self._lines.get(r, '?')}" for r in sorted(left))
            self._job.abort_job(
                f"interrupted, and {format_ranks(left)} did not come to a point at which all ranks "
                f"can be interrupted:\n{lines}"
            )
