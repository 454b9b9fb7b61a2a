"""In the hub: surveys of all ranks, and the reports about stalls.

A survey asks every watcher for the state of its rank and merges the replies.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

from instep.distributed.watchdog.connection import Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.job_state import JobState
from instep.distributed.watchdog.stalls import report
from instep.process import write_text
from instep.process.exit_status import format_ranks

REPLY_SECONDS = 6.0
"""For the watchers to describe their ranks; the ones that have not are named."""
RESUMED_SECONDS = 1.0
"""After the end of a stall, until a line says so: a rank may have left the collective by an error
that ends the job."""
SLOW_LEVEL = 3
"""Ranks that are slow, and not stuck, are reported at 4 times the threshold."""
_STDERR = 2

Done = Callable[[dict[int, Message]], None]


class StallCoordinator:
    """Takes surveys, and prints a report when ranks have waited long."""

    def __init__(self, loop: EventLoop, job: JobState, rank_pid: int) -> None:
        """`rank_pid`: of rank 0; a name for the file of stacks."""
        self._loop, self._job, self._rank_pid = loop, job, rank_pid
        self._number = 0
        self._open: dict[int, tuple[dict[int, Message], Done]] = {}
        """By its number: the states that have arrived, and the function that takes them."""
        self._stalled: dict[int, Message] = {}
        """The last "stalled" of each rank that still waits."""
        self._reported_level = 0
        """Of the stall that goes on."""
        self._has_printed = False
        """Whether it was reported in print."""
        self._longest: dict[str, float] = {}
        """Seconds of waits that were reported and ended well, by the script's line."""
        self._file: int | None = None
        self._path = ""

    # ------------------------------------------------------------------------------- messages

    def handle(self, rank: int, message_type: str, message: Message) -> None:
        """Handle a message of a watcher."""
        if message_type == "state":
            self._add_state(rank, message)
        elif message_type == "stalled":
            self._stalled[rank] = message
            usual = self._longest.get(message["line"], 0.0)
            if message["level"] > self._reported_level and message["waited"] > 2 * usual:
                self._reported_level = message["level"]
                self._take("stuck", self._print_report)
        elif rank in self._stalled:
            line = self._stalled.pop(rank)["line"]
            if self._has_printed:  # else a wait for a slow rank would hide one for a stuck rank
                self._longest[line] = max(message["waited"], self._longest.get(line, 0.0))
            self._stall_over(message["waited"])

    def remove(self, rank: int) -> None:
        """This rank has ended."""
        self._stalled.pop(rank, None)
        self._stall_over(None)
        for states, _ in self._open.values():
            states.setdefault(rank, {"what": "has ended"})

    def handle_request(self, question: Message, reply: Callable[[str], None]) -> None:
        """Answer a question of `instep where`."""
        if question["type"] == "status":
            self._take("progress", lambda states: reply(report.format_progress(states)))
        elif question["type"] == "where":
            self._take("stuck", lambda states: reply(report.format_states(states)))
        else:
            self._take(
                "all",
                lambda states: reply(
                    f"{report.format_states(states)}\n\n{report.format_stacks(states)}"
                ),
            )

    # --------------------------------------------------------------------------------- surveys

    def _take(self, depth: str, done: Done) -> None:
        self._number += 1
        number = self._number
        self._open[number] = {}, done
        self._loop.call_later(REPLY_SECONDS, lambda: self._close(number))
        self._job.broadcast("describe", request=number, depth=depth)

    def _add_state(self, rank: int, message: Message) -> None:
        if message["request"] in self._open:
            states, _ = self._open[message["request"]]
            states[rank] = message
            if states.keys() >= self._job.connected_ranks():
                self._close(message["request"])

    def _close(self, number: int) -> None:
        if number not in self._open:
            return
        states, done = self._open.pop(number)
        connected = self._job.connected_ranks()
        for rank in set(range(self._job.size)) - states.keys():
            silent = "is on a host that does not answer" if rank in connected else "has ended"
            states[rank] = {"what": silent}
        done(states)

    # --------------------------------------------------------------------------------- reports

    def _print_report(self, states: dict[int, Message]) -> None:
        if self._job.is_ending() or not self._stalled:
            return
        if not any("waited" in state for state in states.values()):
            return  # the ranks were idle, and no one of them waits
        if report.are_slow(states) and self._reported_level < SLOW_LEVEL:
            return
        self._has_printed = True
        text = f"instep: {report.format_states(states)}\n"
        stacks = report.format_stacks(states)
        if stacks and self._append(f"{text}{stacks}\n"):
            ranks = report.ranks_with_stacks(states)
            about = format_ranks(ranks, shortest_range=report.SHORTEST_RANGE)
            text += f"instep: the stacks of {about} are in {self._path}\n"
        _print(text)

    def _append(self, text: str) -> bool:
        """Write to the file of stacks, which only this user can read; False where it cannot be."""
        try:
            if self._file is None:
                self._file, self._path = tempfile.mkstemp(
                    ".txt", f"instep-stacks-{self._rank_pid}-"
                )
            write_text(self._file, text)
        except OSError:
            return False
        return True

    def _stall_over(self, waited: float | None) -> None:
        if self._stalled or not self._reported_level:
            return
        self._reported_level, has_printed, self._has_printed = 0, self._has_printed, False
        if waited is not None and has_printed:
            self._loop.call_later(RESUMED_SECONDS, lambda: self._print_resumed(waited))

    def _print_resumed(self, waited: float) -> None:
        if not self._job.is_ending() and not self._stalled:
            _print(f"instep: the ranks go on, after {report.format_seconds(waited)}\n")


def _print(text: str) -> None:
    try:
        write_text(_STDERR, text)
    except OSError:
        return
