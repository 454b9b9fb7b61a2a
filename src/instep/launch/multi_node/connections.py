"""Messages between the supervisors of several hosts, during the job and at its end.

Each message is a JSON object on one line. The first host has a connection to each other host, and
passes on the messages that concern all: that the job must end. At the end each supervisor sends
how its ranks ended, and the first one sends the result of the whole job to all.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from instep.launch.multi_node.hosts import JobInfo
from instep.process import settings
from instep.process.failures.record import DETECTION_DELAY, Failure, RankExit
from instep.training.checkpoint.resume_point import ResumePoint

Message = dict[str, Any]
FAILING: Message = {"failing": True}
"""A rank has failed, or a host is lost: the receiver ends its ranks."""
_PING: Message = {"asks": True}
_PONG: Message = {"answers": True}
_PING_INTERVAL = 1.0
"""Seconds between two pings by a supervisor that waits. A supervisor that Ctrl-Z has stopped keeps
its connection open and does not answer."""
_WARN_AFTER, _LOST_AFTER = 3.0, 6.0
"""Seconds without an answer until a line about it is printed, and until the host counts as lost if
the job is ending. Otherwise INSTEP_TIMEOUT is the limit."""


def end_request(number: int) -> Message:
    """The message that a signal has asked a supervisor to end the job."""
    return {"asked": number}


@dataclass(frozen=True)
class HostResult:
    """How the ranks of one or several hosts ended."""

    ends: Sequence[RankExit]
    failures: Sequence[Failure]
    resume_point: ResumePoint | None = None
    """The last checkpoint that its ranks have completed or gone on from."""


class SupervisorConnections:
    """One supervisor's connections to the others. On one host there is none."""

    def __init__(self, job_info: JobInfo) -> None:
        self._job_info = job_info
        self._open = dict(job_info.connections)
        self._partial = dict.fromkeys(job_info.connections, b"")
        self._lost: list[Failure] = []
        self._results: dict[int, HostResult] = {}
        self._sent: list[Message] = []
        self._job_result: Message | None = None
        self._last_heard: dict[int, float] = {}
        """The time of each one's last message since this host's ranks have ended."""
        self._warned = False
        for connection in job_info.connections.values():
            _enable_keepalive(connection)

    @property
    def connections(self) -> dict[int, socket.socket]:
        """The open connections, by host."""
        return dict(self._open)

    def receive(self, node: int) -> list[Message]:
        """Read from host `node` the messages that concern the ranks; call when readable."""
        try:
            data = self._open[node].recv(65536)
        except OSError:
            data = b""
        if not data:
            return self._close(node)
        *lines, self._partial[node] = (self._partial[node] + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if _PING in messages:
            self._send(_PONG, [node])
        return [message for message in messages if not self._store_result(node, message)]

    def broadcast(self, message: Message) -> None:
        """Send to all, but each message only once, because every receiver passes it on."""
        if message not in self._sent:
            self._sent.append(message)
            self._send(message)

    def exchange_results(self, own_result: HostResult) -> HostResult:
        """Send how this host's ranks ended, wait for the other hosts, and return how all ended.

        A host whose supervisor does not answer for long counts as lost.
        """
        self._last_heard = dict.fromkeys(self._open, time.monotonic())
        if self._job_info.node == 0:
            self._results[0] = own_result
            self._wait(lambda: len(self._results) + len(self._lost) == len(self._job_info.sizes))
            result = self._merge_results()
            self._send({"verdict": _to_json(result)})
        else:
            self._send({"outcome": _to_json(own_result)})
            self._wait(lambda: self._job_result is not None or bool(self._lost))
            message = self._job_result
            result = self._with_lost(own_result) if message is None else _from_json(message)
        for connection in self._open.values():
            connection.close()
        return result

    def _wait(self, is_done: Callable[[], bool]) -> None:
        with selectors.DefaultSelector() as selector:
            for node, connection in self._open.items():
                selector.register(connection, selectors.EVENT_READ, node)
            while not is_done():
                ready = [key.data for key, _ in selector.select(_PING_INTERVAL)]
                for node in ready:
                    self._last_heard[node] = time.monotonic()
                    for message in self.receive(node):
                        self.broadcast(message)
                if not ready:
                    self._send(_PING)
                for node in [*self._open]:
                    self._check_silence(node, time.monotonic() - self._last_heard[node])
                for key in [*selector.get_map().values()]:
                    if key.data not in self._open:
                        selector.unregister(key.fileobj)

    def _check_silence(self, node: int, silent: float) -> None:
        """Warn about a host that was silent for so many seconds, or count it as lost."""
        name = self._job_info.names[node]
        limit = _LOST_AFTER if self._sent else settings.timeout().total_seconds()
        if silent > limit:
            text = (
                f"The `instep run` of {name} has not answered for {silent:.0f} s; it was stopped "
                "(Ctrl-Z), or hangs."
            )
            for message in self._close(node, text):
                self.broadcast(message)
        elif silent > _WARN_AFTER and not self._warned:
            self._warned = True
            report = f"instep: waits for the `instep run` of {name}, which does not answer"
            os.write(2, f"{report}; has it been stopped (Ctrl-Z)?\n".encode())

    def _store_result(self, node: int, message: Message) -> bool:
        """Store a message of the end; False if the message concerns the ranks."""
        if "outcome" in message:
            self._results[node] = _from_json(message["outcome"])
        elif "verdict" in message:
            self._job_result = message["verdict"]
        else:
            return message in (_PING, _PONG)
        return True

    def _close(self, node: int, text: str = "") -> list[Message]:
        """Close a connection. Before the end of the job this means that the host is lost."""
        self._open.pop(node).close()
        if node in self._results or self._job_result is not None:
            return []
        job_info = self._job_info
        first = sum(job_info.sizes[:node])
        name = job_info.names[node]
        self._lost.append(
            Failure(first, time.time() - DETECTION_DELAY, 1, text=text, lost_host=name)
        )
        return [FAILING]

    def _merge_results(self) -> HostResult:
        parts = self._results.values()
        ends = [end for part in parts for end in part.ends]
        failures = [failure for part in parts for failure in part.failures]
        point = next((part.resume_point for part in parts if part.resume_point), None)
        return self._with_lost(HostResult(ends, failures, point))

    def _with_lost(self, outcome: HostResult) -> HostResult:
        return replace(outcome, failures=[*outcome.failures, *self._lost])

    def _send(self, message: Message, nodes: Iterable[int] | None = None) -> None:
        """To these hosts; None: to all."""
        line = json.dumps(message).encode() + b"\n"
        for node in self._open if nodes is None else nodes:
            with suppress(OSError):  # the next receive finds the connection closed
                self._open[node].sendall(line)


def _to_json(outcome: HostResult) -> Message:
    return {
        "ends": [asdict(end) for end in outcome.ends],
        "failures": [asdict(failure) for failure in outcome.failures],
        "resume_point": outcome.resume_point and asdict(outcome.resume_point),
    }


def _from_json(message: Message) -> HostResult:
    point = message["resume_point"]
    return HostResult(
        [RankExit(**end) for end in message["ends"]],
        [Failure(**f) for f in message["failures"]],
        point and ResumePoint(**point),
    )


def _enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel close the connection of a host that is gone after four seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 4000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
