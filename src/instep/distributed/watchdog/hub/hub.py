"""The hub's entry: it receives the messages of all watchers, and passes each to what handles it."""

from __future__ import annotations

import socket
from functools import partial

from instep.distributed.watchdog.connection import Connection, Message
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.hub.deadlocks import WaitingRanks
from instep.distributed.watchdog.hub.first_failure import FirstFailure
from instep.distributed.watchdog.hub.mismatch_check import MismatchCheck
from instep.distributed.watchdog.hub.new_connections import NewConnections
from instep.distributed.watchdog.hub.rank_ends import RankEnds
from instep.distributed.watchdog.job_state import JobState
from instep.distributed.watchdog.messages import failure_fields, is_valid
from instep.distributed.watchdog.signals.signal_coordinator import SignalCoordinator
from instep.distributed.watchdog.stalls.stall_coordinator import StallCoordinator
from instep.process.exit_status import rank_ranges

MAX_ANSWER = 150_000
"""Characters of an answer that is sent to another host: less than the longest message."""


class Hub:
    """Connects the watchers of a job. It runs in the process of rank 0's watcher."""

    def __init__(
        self, loop: EventLoop, size: int, listener: socket.socket, token: str, rank_pid: int = 0
    ) -> None:
        self._loop = loop
        self.job = JobState(size)
        self.new_connections = NewConnections(loop, listener, token, self.job, self._add_watcher)
        self.ends = RankEnds(loop, self.job)
        self._first_failure = FirstFailure(loop, self.job)
        self._waiting = WaitingRanks(loop, self.job)
        self._mismatch = MismatchCheck(loop, self.job)
        self._signals = SignalCoordinator(loop, self.job)
        self.stalls = StallCoordinator(loop, self.job, rank_pid)

    def _add_watcher(self, connection: Connection, messages: list[Message]) -> None:
        """Tell it what the others know already, and handle its messages from now on."""
        hello, *others = messages
        rank, host = hello["rank"], hello["host"]
        self.job.connections[rank] = connection
        self.job.hosts.add(host)
        self._loop.add_reader(connection, partial(self._recv, rank, host))
        if self.job.ended:
            connection.send("ended", ranks=rank_ranges(self.job.ended))
        if self.job.first_failure is not None:
            connection.send("failed", **self.job.first_failure)
        self._signals.add_rank(rank, connection)
        for message in others:
            self._handle(rank, message)

    def _recv(self, rank: int, host: str) -> None:
        job = self.job
        try:
            messages = job.connections[rank].recv()
        except OSError as error:
            messages = None
            lost = f"is lost: its host {host} does not answer ({error.strerror})"
            self._fail(failure_fields(rank, host, 1, lost, silent=True))
        if messages is None or not all(is_valid(each, job.size, rank) for each in messages):
            self._loop.remove_reader(job.connections[rank])
            job.connections.pop(rank).close()
            self._end(rank, None)
            if set(job.connections) <= {0} and 0 in job.ended:
                self._first_failure.all_ended()  # the others have ended, too, or never connected
        else:
            for message in messages:
                self._handle(rank, message)

    def _handle(self, rank: int, message: Message) -> None:
        message_type = message.pop("type")
        if message_type == "ended":
            self._end(rank, message["code"])
        elif message_type == "finished":
            self.job.finished.add(rank)
        elif message_type == "at_exit":
            self.job.broadcast("check_often")
        elif message_type == "failed":
            self._fail(message)
        elif message_type == "failing":
            self._waiting.add_failing(rank)
        elif message_type == "fails_alike":
            self.job.failing_alike.add(rank)
        elif message_type == "waits":
            self._waiting.add(rank, message)
        elif message_type == "resumed":
            self._waiting.remove(rank)
        elif message_type == "is_late":
            self._mismatch.request()
        elif message_type == "collectives":
            self._mismatch.add(rank, message["steps"])
        elif message_type == "question":
            self._answer(rank, message)
        elif message_type in ("stalled", "stall_over", "state"):
            self.stalls.handle(rank, message_type, message)
        else:
            self._signals.handle(rank, message_type, message)

    def _fail(self, failure: Message) -> None:
        self.job.failures.append(failure)
        if len(self.job.failures) == 1:
            self._mismatch.request()
            self._first_failure.choose_soon()

    def _end(self, rank: int, code: int | None) -> None:
        if rank not in self.job.ended:
            self.ends.add(rank, code)
            self.stalls.remove(rank)
            self._first_failure.rank_ended(rank)

    def _answer(self, rank: int, question: Message) -> None:
        """Answer a question that was asked on the host of this rank."""

        def reply(text: str) -> None:
            number = question["number"]
            self.job.send(rank, "answer", number=number, text=text[:MAX_ANSWER])

        self.stalls.handle_request({"type": question["kind"]}, reply)
