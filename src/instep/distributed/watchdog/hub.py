"""The hub: it connects the watchers of a job. It runs in the process of rank 0's watcher."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Set
from contextlib import suppress
from functools import partial
from hmac import compare_digest

from instep.distributed.errors import DisagreementError
from instep.distributed.watchdog.connection import Connection, Message, accept, encode
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.failure_analysis import (
    find_deadlock,
    find_first_failure,
    format_waits,
)
from instep.distributed.watchdog.interrupt_coordinator import SignalCoordinator
from instep.distributed.watchdog.messages import failure_fields, is_valid
from instep.distributed.watchdog.mismatch import EnteredCollectives, Step, has_line
from instep.distributed.watchdog.stalls.stall_coordinator import StallCoordinator
from instep.process.exit_status import (
    UNKNOWN_RANK,
    describe_early_exit,
    format_failure,
    rank_ranges,
)

COLLECT_SECONDS = 0.1
"""Between the first report of a failure and the choice of the first failure. A death is seen later
than it happens, and a peer may have reported an error in between."""
MAX_POSTPONED, EXITING_POSTPONED = 5, 25
"""Postponements of that choice; the second where the failure is a wait for a rank that has left and
whose failure or exit code is not known yet: on a busy machine an interpreter takes a second or more
to exit. The rank that failed waits for 3 seconds (`client.DECISION_SECONDS`)."""
FAILED_RANK_SECONDS = 8.0
"""For the rank that failed to print, clean up and exit, before the others are ended."""
LAUNCHER_SECONDS = 0.2
"""From the end of the rank that failed to that of the others: their launcher sees it first."""
OTHERS_SECONDS = 0.9
"""For the other ranks to exit."""
REQUESTED = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP}
"""Exit codes of ranks that were asked to end."""
DEADLOCK_SECONDS, EXIT_DEADLOCK_SECONDS = 3.0, 1.0
"""Until ranks that seem deadlocked are checked again; the second where one of them is at the end of
its script and so enters no further collective."""
HELLO_SECONDS = 5.0
"""Within which a new connection must identify itself."""
ANSWER_SECONDS, MAX_ANSWERS_AWAITED = 0.3, 20
"""For the watchers to say which collectives their ranks have entered. If these differ, it is waited
so often again for all lines: torch takes seconds for the first stacks."""
MAX_ANSWER = 150_000
"""Characters of an answer that is sent to another host: less than the longest message."""
MAX_STRANGERS = 64
"""Unidentified connections beside those of ranks that are to come; then the oldest is closed."""
ENDED_SECONDS_PER_RANK = 20e-6
"""Between two messages to all about ranks that have ended: at most 50,000 are sent a second."""
ANSWER_SECONDS_PER_RANK = 0.5e-3
"""To read an answer takes the hub a part of it."""
SUSPECT_SECONDS = 0.05
"""From the first rank that is said to wait until all that are known to wait are looked at."""


class Hub:
    """Receives the reports of all watchers, finds the first failure, and ends the other ranks."""

    def __init__(
        self, loop: EventLoop, size: int, listener: socket.socket, token: str, rank_pid: int = 0
    ) -> None:
        self._loop, self._size, self._token = loop, size, token
        self._listener = listener
        self._unidentified: dict[Connection, None] = {}
        """New connections, oldest first."""
        self._connections: dict[int, Connection] = {}
        self._hosts: set[str] = set()
        self._ended: dict[int, int | None] = {}
        """The exit codes of the ranks that have ended."""
        self._untold: list[int] = []
        """Those of them of which the watchers have not been told."""
        self._tells_ended = False
        """Whether they will be told soon."""
        self._failures: list[Message] = []
        """In the order of their arrival."""
        self._first: Message | None = None
        """The failure that is reported, once it is chosen."""
        self._finished: set[int] = set()
        """The ranks whose program has ended normally."""
        self._failing: set[int] = set()
        """The ranks that wait with a failure until rank 0 has failed, too, or cannot."""
        self._postponed = 0
        self._ending_others = self._over = False
        """Whether the other ranks were told to exit; whether the hub's work is done."""
        self._interrupts = SignalCoordinator(loop, self)
        self.stalls = StallCoordinator(loop, self, size, rank_pid)
        self._waits: dict[int, Message] = {}
        """The collectives of the ranks that make no progress."""
        self._suspects = False
        """Whether these are about to be looked at."""
        self._entered = EnteredCollectives()
        """The last collectives that each rank has entered, since they were asked for."""
        self._asks_collectives = self._mismatch_reported = False
        self._answers_awaited = 0
        self._answer_seconds = max(ANSWER_SECONDS, ANSWER_SECONDS_PER_RANK * size)
        listener.setblocking(False)
        loop.add_reader(listener, self._accept)

    def add_client(self, sock: socket.socket) -> None:
        """Wait for the hello of a new connection, which may be a watcher's or a stranger's."""
        connection = Connection(sock)
        self._unidentified[connection] = None
        self._loop.add_reader(connection, partial(self._recv_hello, connection))
        self._loop.call_later(HELLO_SECONDS, partial(self._reject, connection))
        if len(self._unidentified) > MAX_STRANGERS + self._size - len(self._connections):
            self._reject(next(iter(self._unidentified)))

    def _accept(self) -> None:
        with suppress(OSError):  # the peer has closed its end again
            self.add_client(accept(self._listener))

    def _reject(self, connection: Connection) -> None:
        """Close a connection unless it has identified itself."""
        if connection in self._unidentified:
            del self._unidentified[connection]
            self._loop.remove_reader(connection)
            connection.close()

    def _recv_hello(self, connection: Connection) -> None:
        try:
            messages = connection.recv()
        except OSError:
            messages = None
        if messages == []:
            return  # it is incomplete
        if messages is None or not self._is_hello(messages[0]):
            self._reject(connection)
            return
        del self._unidentified[connection]
        self._loop.remove_reader(connection)
        rank, host = messages[0]["rank"], messages[0]["host"]
        self._connections[rank] = connection
        self._hosts.add(host)
        self._loop.add_reader(connection, partial(self._recv, rank, host))
        if self._ended:
            connection.send("ended", ranks=rank_ranges(self._ended))
        if self._first is not None:
            connection.send("failed", **self._first)
        self._interrupts.add_rank(rank, connection)
        for message in messages[1:]:
            self._handle(rank, message)

    def _is_hello(self, message: Message) -> bool:
        """Whether it is from a watcher of this job, whose rank is not connected yet."""
        return (
            message["type"] == "hello"
            and is_valid(message, self._size)
            and compare_digest(message["token"].encode(errors="replace"), self._token.encode())
            and message["rank"] not in self._connections
        )

    def _recv(self, rank: int, host: str) -> None:
        try:
            messages = self._connections[rank].recv()
        except OSError as error:
            messages = None
            lost = f"is lost: its host {host} does not answer ({error.strerror})"
            self._fail(failure_fields(rank, host, 1, lost, silent=True))
        if messages is None or not all(is_valid(each, self._size, rank) for each in messages):
            self._loop.remove_reader(self._connections[rank])
            self._connections.pop(rank).close()
            self._end(rank, None)
            if set(self._connections) <= {0} and 0 in self._ended:
                self._all_ended()  # the others have ended, too, or never connected
        else:
            for message in messages:
                self._handle(rank, message)

    def _handle(self, rank: int, message: Message) -> None:
        message_type = message.pop("type")
        if message_type == "ended":
            self._end(rank, message["code"])
        elif message_type == "finished":
            self._finished.add(rank)
        elif message_type == "at_exit":
            self.broadcast("check_often")
        elif message_type == "failed":
            self._fail(message)
        elif message_type == "failing":
            self._failing.add(rank)
            self._send(0, "check_often")
            self._release_failing()
        elif message_type == "waits":
            self._waits[rank] = message
            self._release_failing()
            if not self._suspects:
                self._suspects = True
                self._loop.call_later(SUSPECT_SECONDS, self._suspect_deadlock)
        elif message_type == "is_late":
            self._ask_collectives()
        elif message_type == "collectives":
            self._compare_collectives(rank, message["steps"])
        elif message_type == "resumed":
            self._waits.pop(rank, None)
        elif message_type == "question":
            self._answer(rank, message)
        elif message_type in ("stalled", "stall_over", "state"):
            self.stalls.handle(rank, message_type, message)
        else:
            self._interrupts.handle(rank, message_type, message)

    def _answer(self, rank: int, question: Message) -> None:
        """Answer a question that was asked on the host of this rank."""

        def reply(text: str) -> None:
            self._send(rank, "answer", number=question["number"], text=text[:MAX_ANSWER])

        self.stalls.handle_request({"type": question["kind"]}, reply)

    def _send(self, rank: int, message_type: str, **fields: object) -> None:
        """Send a message to the watcher of this rank, if it is connected."""
        if rank in self._connections:
            self._connections[rank].send(message_type, **fields)

    def broadcast(self, message_type: str, **fields: object) -> None:
        """Send a message to every watcher."""
        line = encode(message_type, **fields)
        for connection in self._connections.values():
            connection.send_line(line)

    def running_ranks(self) -> set[int]:
        """The connected ranks whose programs have not ended."""
        return self._connections.keys() - self._ended.keys() - self._finished

    def connected_ranks(self) -> Set[int]:
        """The ranks whose watchers are connected; a view."""
        return self._connections.keys()

    def is_ending(self) -> bool:
        """Whether a rank has failed, or has ended."""
        return bool(self._failures or self._ended)

    def is_incomplete(self) -> bool:
        """Whether a rank has failed, or its program has ended."""
        return self.is_ending() or bool(self._finished)

    def all_connected(self) -> bool:
        """Whether every rank has connected, or has ended."""
        return len(self._connections.keys() | self._ended.keys()) == self._size

    def abort_job(self, text: str) -> None:
        """Let the lowest running rank fail with this text, unless another failure is known."""
        if self._first is None and not self._failures:
            self._send(min(self.running_ranks(), default=0), "abort", text=text)

    # ------------------------------------------------------------------------------- failures

    def _fail(self, failure: Message) -> None:
        self._failures.append(failure)
        if len(self._failures) == 1:
            self._ask_collectives()
            self._loop.call_later(COLLECT_SECONDS, self._choose_first)

    def _release_failing(self) -> None:
        while self._failing and 0 in self._waits:
            self._send(self._failing.pop(), "rank_0_waits")

    def _choose_first(self) -> None:
        silent = [failure for failure in self._failures if failure["silent"]]
        if len(silent) == self._size and {failure["code"] for failure in silent} <= REQUESTED:
            self._finish()  # somebody ended the whole job, and knows it
            return
        exiting = self._finished - self._ended.keys()  # one of them may have failed, unreported
        first = find_first_failure(self._failures)
        awaited = {first.get("awaited_rank")} - {each["rank"] for each in self._failures}
        leaving = awaited & self.running_ranks()  # it may be about to report why
        limit = EXITING_POSTPONED if leaving or awaited & exiting else MAX_POSTPONED
        is_open = not self.all_connected() or leaving or (exiting and not silent)
        if is_open and self._postponed < limit:
            self._postponed += 1
            self._loop.call_later(COLLECT_SECONDS, self._choose_first)
            return
        self._first = first
        self._first["headline"] = self._headline(self._first)
        self.broadcast("failed", **self._first)
        if self._first["rank"] in self._ended:
            self._end_others()
        else:
            self._loop.call_later(FAILED_RANK_SECONDS, self._end_others)

    def _headline(self, first: Message) -> str:
        """If the failure is a wait for a rank that had ended, the line is about the latter."""
        rank, awaited = first["rank"], first.get("awaited_rank")
        if awaited == UNKNOWN_RANK:
            awaited = min(self._finished - {rank}, default=None)
        on_host = f" on {first['host']}" if len(self._hosts) > 1 else ""
        description = first["description"] + on_host
        if awaited is not None and (awaited in self._finished or self._ended.get(awaited) == 0):
            description, rank = describe_early_exit(rank), awaited
        others = set(range(self._size)) - {rank, *first.get("with", ())}
        finished = others & self._finished
        return format_failure(rank, self._size, description, finished, others - finished)

    def _end_others(self) -> None:
        if not self._ending_others:
            self._ending_others = True
            self.broadcast("exit")
            self._loop.call_later(OTHERS_SECONDS, self._finish)

    def _end(self, rank: int, code: int | None) -> None:
        if rank in self._ended:
            return
        self._ended[rank] = code
        self._untold.append(rank)
        if not self._tells_ended:
            self._tell_ended()
        self.stalls.remove(rank)
        if self._first is not None and rank == self._first["rank"]:
            self._loop.call_later(LAUNCHER_SECONDS, self._end_others)
        if len(self._ended) == self._size:
            self._all_ended()

    def _tell_ended(self) -> None:
        """Tell all watchers which ranks have ended since the last time: the first at once."""
        self._tells_ended = bool(self._untold)
        if self._untold:
            self.broadcast("ended", ranks=rank_ranges(self._untold))
            self._untold.clear()
            self._loop.call_later(ENDED_SECONDS_PER_RANK * self._size, self._tell_ended)

    def _all_ended(self) -> None:
        if self._first is not None or not self._failures:  # else the first is about to be chosen
            self._finish()

    def _finish(self) -> None:
        if self._over:
            return
        self._over = True
        if self._first is not None:
            self.broadcast("over")
        if self._first is None or 0 not in self._connections:
            self._loop.stop()  # else rank 0's watcher, in this loop, does so after its report

    # ------------------------------------------------------------------------------ deadlocks

    def _suspect_deadlock(self) -> None:
        self._suspects = False
        if suspects := find_deadlock(self._waits):
            waits = {rank: self._waits[rank] for rank in suspects}
            at_exit = any(wait["op"] == "exit" for wait in waits.values())
            delay = EXIT_DEADLOCK_SECONDS if at_exit else DEADLOCK_SECONDS
            self._loop.call_later(delay, partial(self._check_deadlock, waits))

    def _check_deadlock(self, waits: dict[int, Message]) -> None:
        """It is one if these ranks still wait as they did."""
        if (
            self._first is None
            and not self._failures
            and all(self._waits.get(rank) is wait for rank, wait in waits.items())
        ):
            text = "the ranks wait for each other in different collectives:\n"
            self._send(min(waits), "abort", text=text + format_waits(waits))

    # --------------------------------------------------------------------------- disagreements

    def _ask_collectives(self) -> None:
        """Ask each watcher which collectives its rank has entered."""
        if not (self._asks_collectives or self._mismatch_reported):
            self._asks_collectives = True
            if not self._failures:  # else a rank that fails has told its own, and answers no more
                self._entered = EnteredCollectives()
            self.broadcast("get_collectives", with_stacks=False)
            self._loop.call_later(self._answer_seconds, self._report_mismatch)

    def _compare_collectives(self, rank: int, steps: list[Step]) -> None:
        if not self._mismatch_reported:
            self._entered.add(rank, steps)
            if self._failures and len(self._entered.find_mismatch()) > 1:
                self._report_mismatch()  # the other ranks are about to be ended

    def _report_mismatch(self) -> None:
        """End the job if the ranks have entered different collectives, or explain its failure."""
        sides = self._entered.find_mismatch()
        is_complete = all(has_line(text) for text in sides)
        if not (self._failures or is_complete) and self._answers_awaited < MAX_ANSWERS_AWAITED:
            if self._answers_awaited == 0:
                self.broadcast("get_collectives", with_stacks=True)
            self._answers_awaited += 1
            self._loop.call_later(self._answer_seconds, self._report_mismatch)
            return
        self._asks_collectives, self._answers_awaited = False, 0
        if not sides or self._mismatch_reported:
            return
        self._mismatch_reported = True
        text = str(DisagreementError.of_collectives(sides))
        if self._failures:
            os.write(2, f"instep: {text}\n".encode())
        else:
            self.abort_job(f"{text}\n")
