"""The supervisor of a job's ranks on this host: wait for them, end them together."""

from __future__ import annotations

import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from instep.launch.multi_node import connections
from instep.launch.multi_node.connections import Message, SupervisorConnections
from instep.launch.ranks.rank_process import RankProcess
from instep.launch.signals import (
    AFTER_FAILURE,
    AFTER_INTERRUPT,
    AFTER_SIGNAL,
    KILL,
    PASSED_SIGNALS,
    REPORT_SIGNALS,
    EndStep,
    SignalQueue,
)
from instep.launch.where.command import print_report
from instep.launch.worker.control_bytes import FAILED
from instep.process import pending_writes, print_line, settings
from instep.process.failures.record import RankExit
from instep.process.procfs import handles_signal

POLL_INTERVAL = 0.05
"""Seconds between two checks whether a rank has finished its file."""
CAUSE_SECONDS = 2.5
"""The first step lasts this long while no rank has failed by itself: on a busy host the rank with
the cause may still be about to report it, or its watcher the collective that it has entered."""
EXIT_SECONDS = 5.0
"""For which a rank that has failed runs what its script has registered for its end."""
_SLOW_START = 2
"""A start takes long after so many times INSTEP_ARRIVAL_NOTICE."""
INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT, -signal.SIGTERM)
"""Exit codes of an interrupted rank; the last one of a rank that had not started its program."""


class Supervisor:
    """Waits for the ranks, and ends them if one fails or if the job is asked to end."""

    def __init__(self, signal_queue: SignalQueue, connections: SupervisorConnections) -> None:
        self.connections = connections
        self.requested_signal: signal.Signals | None = None
        """The signal that asked this job to end before any rank had failed."""
        self.signalled_again = False
        """Whether the job must end: by another signal than SIGINT, or by a second signal."""
        self._ranks: Sequence[RankProcess] = ()
        self._steps: list[EndStep] | None = None
        """The remaining steps of ending the job; None while it runs."""
        self._may_survive = False
        """Whether the ranks got one SIGINT, and none has failed for another reason."""
        self._ending_by: signal.Signals | None = None
        """The last signal that the ranks got to end them."""
        self._deadline = float("inf")
        self._notice_time = time.monotonic() + _SLOW_START * int(settings.ARRIVAL_NOTICE)
        self._writes_until = 0.0
        """Until this time ranks that are writing a file get no signal."""
        self._exits_until = 0.0
        """Until this time ranks that have failed are not killed."""
        self._selector = selectors.DefaultSelector()
        self._signal_queue = signal_queue
        self._on(signal_queue, self._on_signal)

    @property
    def ends(self) -> list[RankExit]:
        """How the ranks ended, by their numbers."""
        return [rank.end for rank in self._ranks if rank.end is not None]

    def wait(self, ranks: Sequence[RankProcess]) -> None:
        """Return after all `ranks` have ended."""
        self._ranks = ranks
        for rank in ranks:
            self._on(rank.pidfd, partial(self._on_rank_end, rank))
            self._on(rank.line, partial(self._on_rank_message, rank))
        for node, line in self.connections.connections.items():
            self._on(line, partial(self._on_supervisor_message, node, line))
        with self._selector:
            while len(self.ends) < len(ranks):
                for key, _ in self._selector.select(self._time_left()):
                    key.data()
                self._mention_slow_start()
                if time.monotonic() >= self._deadline and not self._waits_for_rank():
                    self._next_step()

    def _mention_slow_start(self) -> None:
        """Print one line if ranks take long to begin their program."""
        waiting = sum(not rank.has_begun and rank.end is None for rank in self._ranks)
        if not waiting or self._steps is not None:
            self._notice_time = float("inf")
        elif time.monotonic() >= self._notice_time:
            self._notice_time = float("inf")
            ranks = f"{waiting} of {len(self._ranks)} ranks on this host"
            why = "they import PyTorch, or wait for other ranks"
            print_line(f"still starting: {ranks} ({why}).")

    def _waits_for_rank(self) -> bool:
        """Whether the next step waits because a rank is writing a file, or that of KILL because a
        rank has failed and is exiting."""
        now = time.monotonic()
        waits = now < self._writes_until and any(rank.has_pending_file() for rank in self._ranks)
        if self._steps == [KILL] and now < self._exits_until:
            waits |= any(rank.is_exiting() for rank in self._ranks)
        if waits:
            self._deadline = now + POLL_INTERVAL
        return waits

    def _on(self, source: int | socket.socket | SignalQueue, react: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _time_left(self) -> float | None:
        left = min(self._deadline, self._notice_time) - time.monotonic()
        return None if left == float("inf") else max(0.0, left)

    def _on_rank_end(self, rank: RankProcess) -> None:
        self._selector.unregister(rank.pidfd)
        if (code := rank.record_end(self._ending_by).code) != 0:
            self._on_rank_failure(AFTER_INTERRUPT if code in INTERRUPTED else AFTER_FAILURE)

    def _on_rank_message(self, rank: RankProcess) -> None:
        message = rank.receive()
        if not message:
            self._selector.unregister(rank.line)
        if FAILED in message:
            self._on_rank_failure(AFTER_INTERRUPT)

    def _on_supervisor_message(self, node: int, line: socket.socket) -> None:
        messages = self.connections.receive(node)
        if node not in self.connections.connections:
            self._selector.unregister(line)
        for message in messages:
            if "asked" in message:
                self._on_end_request(signal.Signals(message["asked"]))
            else:
                self._on_failure(AFTER_FAILURE)

    def _on_signal(self) -> None:
        for number in self._signal_queue.pop_all():
            if number in REPORT_SIGNALS:
                self._start_report(status=number is signal.SIGUSR1)
                if number is signal.SIGUSR1:
                    self._send_to_ranks(number, handled_only=True)
            elif number in PASSED_SIGNALS:
                self._send_to_ranks(number)
            elif self._steps is None:
                self._on_end_request(number)
            else:
                self.signalled_again = self.requested_signal is not None
                self._may_survive = False
                self.connections.broadcast(connections.FAILING)
                self._next_step()

    def _start_report(self, *, status: bool) -> None:
        """Print a report on the ranks, in a thread: it takes seconds."""
        pids = [rank.pid for rank in self._ranks if rank.end is None]
        report = partial(print_report, pids, status=status)
        threading.Thread(target=report, daemon=True).start()

    def _on_end_request(self, number: signal.Signals) -> None:
        if self._steps is None:
            self.requested_signal = number
            self._may_survive = number is signal.SIGINT
            self.signalled_again = not self._may_survive
            self._end_job(AFTER_SIGNAL[number], connections.end_request(number))

    def _on_rank_failure(self, after_interrupt: Sequence[EndStep]) -> None:
        """A rank of this host has failed."""
        self._on_failure(after_interrupt)
        if self._ending_by is None and not any(rank.failed_by_itself() for rank in self._ranks):
            self._deadline = max(self._deadline, time.monotonic() + CAUSE_SECONDS)

    def _on_failure(self, after_interrupt: Sequence[EndStep]) -> None:
        """A rank has failed. If the others may have survived a SIGINT, follow these steps."""
        if not self._may_survive:
            self._end_job(AFTER_FAILURE)
        elif after_interrupt is AFTER_FAILURE or self._deadline == float("inf"):
            self._may_survive = after_interrupt is not AFTER_FAILURE
            self._steps = list(after_interrupt)
            self._next_step()

    def _end_job(self, steps: Sequence[EndStep], why: Message = connections.FAILING) -> None:
        """Begin with the first of `steps`, unless the job is already ending."""
        if self._steps is None:
            self._steps = list(steps)
            if steps is AFTER_FAILURE:
                self._writes_until = time.monotonic() + pending_writes.WAIT_LIMIT
                self._exits_until = time.monotonic() + EXIT_SECONDS
            self.connections.broadcast(why)
            self._next_step()

    def _next_step(self) -> None:
        if not self._steps:
            return
        step = self._steps.pop(0)
        self._deadline = time.monotonic() + step.timeout
        if step.signal is not None:
            self._ending_by = None if step.signal is signal.SIGINT else step.signal
            self._send_to_ranks(step.signal, even_exiting=step is KILL)

    def _send_to_ranks(
        self, number: signal.Signals, *, even_exiting: bool = False, handled_only: bool = False
    ) -> None:
        """Send a signal to every rank of this host that runs, or to those that handle it."""
        for rank in self._ranks:
            if handled_only and not handles_signal(rank.pid, number):
                continue
            if rank.end is None and (even_exiting or not rank.is_exiting()):
                rank.signal(number)
