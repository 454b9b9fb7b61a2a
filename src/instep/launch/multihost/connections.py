"""What the supervisors of several hosts tell each other while the job runs, and at its end.

One JSON object to a line. The first host has a line to each other one and passes on what concerns
all: that the job is to end. At the end each sends how its ranks ended, and the first says to all
what that means.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from instep.launch.multihost.hosts import JobInfo
from instep.process import settings
from instep.process.failure import DETECTION_DELAY, Failure, RankExit

Message = dict[str, Any]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAILING: Message = {"failing": True}
"""A rank has failed, or a host is lost: end yours."""
_ASKS: Message = {"asks": True}
_ANSWERS: Message = {"answers": True}
_ASK = 1.0
"""Seconds after which a supervisor that has nothing else to do asks whether the others still run.
One that Ctrl-Z has stopped keeps its line, and says nothing."""
_WARN_AFTER, _ENDING = 3.0, 6.0
"""Seconds without an answer until one line says so, and until it is lost where the job has failed
or was asked to end; else INSTEP_TIMEOUT says when."""


_LONGEST = 1 << 28
"""Bytes of a line; the tracebacks of all ranks of a host are in one."""


def end_request(number: int) -> Message:
    """A supervisor was asked to end by a signal."""
    return {"asked": number}


@dataclass(frozen=True)
class HostResult:
    """How the ranks of some hosts ended."""

    ends: Sequence[RankExit]
    failures: Sequence[Failure]


class SupervisorConnections:
    """The lines of one supervisor. On one host there are none, and nothing waits."""

    def __init__(self, job_info: JobInfo) -> None:
        self._job_info = job_info
        self._open = dict(job_info.lines)
        self._partial = dict.fromkeys(job_info.lines, b"")
        self._lost: list[Failure] = []
        self._outcomes: dict[int, HostResult] = {}
        self._broadcasted: list[Message] = []
        self._job_result: Message | None = None
        self._last_heard: dict[int, float] = {}
        """When each was last heard, since this host's ranks have ended."""
        self._warned = False
        for line in job_info.lines.values():
            _enable_keepalive(line)

    @property
    def lines(self) -> dict[int, socket.socket]:
        """Those at whose other end somebody still is, by host."""
        return dict(self._open)

    def receive(self, node: int) -> list[Message]:
        """What the supervisor of host `node` says that concerns the ranks; call when readable."""
        try:
            data = self._open[node].recv(65536)
        except OSError:
            data = b""
        if not data:
            return self._close(node)
        *whole, self._partial[node] = (self._partial[node] + data).split(b"\n")
        messages = [json.loads(line) for line in whole]
        if _ASKS in messages:
            self._send(_ANSWERS)
        return [message for message in messages if not self._store_result(node, message)]

    def broadcast(self, message: Message) -> None:
        """To all: once, since everybody passes it on."""
        if message not in self._broadcasted:
            self._broadcasted.append(message)
            self._send(message)

    def exchange_results(self, mine: HostResult) -> HostResult:
        """The ranks of this host have ended: wait for all, and return how all have ended.

        A host whose supervisor does not answer for long is lost.
        """
        self._last_heard = dict.fromkeys(self._open, time.monotonic())
        if self._job_info.node == 0:
            self._outcomes[0] = mine
            self._wait(lambda: len(self._outcomes) + len(self._lost) == len(self._job_info.sizes))
            whole = self._merge_results()
            self._send({"verdict": _to_json(whole)})
        else:
            self._send({"outcome": _to_json(mine)})
            self._wait(lambda: self._job_result is not None or bool(self._lost))
            told = self._job_result
            whole = self._with_lost(mine) if told is None else _from_json(told)
        for line in self._open.values():
            line.close()
        return whole

    def _wait(self, over: Any) -> None:
        while not over():
            with selectors.DefaultSelector() as selector:
                for node, line in self._open.items():
                    selector.register(line, selectors.EVENT_READ, node)
                ready = [key.data for key, _ in selector.select(_ASK)]
            for node in ready:
                self._last_heard[node] = time.monotonic()
                for message in self.receive(node):
                    self.broadcast(message)
            if not ready:
                self._send(_ASKS)
            for node in [*self._open]:
                self._check_silence(node, time.monotonic() - self._last_heard[node])

    def _check_silence(self, node: int, silent: float) -> None:
        """Whether the supervisor of host `node`, who was `silent` for these seconds, is lost."""
        name = self._job_info.names[node]
        limit = _ENDING if self._broadcasted else float(int(settings.TIMEOUT))
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
        """Keep what belongs to the end; whether that is all there is to do."""
        if "outcome" in message:
            self._outcomes[node] = _from_json(message["outcome"])
        elif "verdict" in message:
            self._job_result = message["verdict"]
        else:
            return message in (_ASKS, _ANSWERS)
        return True

    def _close(self, node: int, text: str = "") -> list[Message]:
        """A supervisor ends its line when all is over, or when it dies."""
        self._open.pop(node).close()
        if node in self._outcomes or self._job_result is not None:
            return []
        job_info = self._job_info
        first = sum(job_info.sizes[:node])
        name = job_info.names[node]
        self._lost.append(
            Failure(first, time.time() - DETECTION_DELAY, 1, text=text, lost_host=name)
        )
        return [FAILING]

    def _merge_results(self) -> HostResult:
        parts = self._outcomes.values()
        ends = [end for part in parts for end in part.ends]
        failures = [failure for part in parts for failure in part.failures]
        return self._with_lost(HostResult(ends, failures))

    def _with_lost(self, outcome: HostResult) -> HostResult:
        return HostResult(outcome.ends, [*outcome.failures, *self._lost])

    def _send(self, message: Message) -> None:
        for line in self._open.values():
            with suppress(OSError):  # heard as a hang-up
                line.sendall(json.dumps(message).encode() + b"\n")


def _understood(line: bytes) -> Message:
    """Raises ValueError for what no supervisor says."""
    message = json.loads(line)
    known = ("asked", "failing", "outcome", "verdict")
    if not isinstance(message, dict) or not any(word in message for word in known):
        raise ValueError("no message")
    if "asked" in message and message["asked"] not in _SIGNALS:
        raise ValueError("no signal that a supervisor is asked to end by")
    return message


def _to_json(outcome: HostResult) -> Message:
    return {
        "ends": [asdict(end) for end in outcome.ends],
        "failures": [asdict(failure) for failure in outcome.failures],
    }


def _from_json(told: Message) -> HostResult:
    return HostResult(
        [RankExit(**end) for end in told["ends"]], [Failure(**f) for f in told["failures"]]
    )


def _enable_keepalive(line: socket.socket) -> None:
    """A host that falls silent is lost after four seconds."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 4000),
    ):
        line.setsockopt(socket.IPPROTO_TCP, option, value)
