"""The process of one rank, as its supervisor sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from instep.distributed.identity.launchers import FAILURE_FILE
from instep.launch.ranks.output import Streams
from instep.launch.worker.control_bytes import BEGUN, GO, READY
from instep.process import python_command
from instep.process.failures.record import Failure, RankExit
from instep.process.pending_writes import marker_path, remove_drafts

ENTRY_MODULE = "instep.launch.worker.entry"
"""What a rank runs first."""


class RankProcess:
    """A started rank: a session of its own, a socket to it, and how it ended."""

    def __init__(
        self, spec: RankSpec, process: subprocess.Popen[bytes], line: socket.socket
    ) -> None:
        self.number = spec.number
        self.line = line
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.end: RankExit | None = None
        self._process = process
        self._record = Path(spec.environ[FAILURE_FILE])
        self._mark = marker_path(self._record)
        self._ready = False
        self.has_begun = False
        """Whether its program has begun."""

    def send_go(self) -> None:
        """Let the rank's program start."""
        with suppress(BrokenPipeError):
            self.line.send(GO)

    def receive(self) -> bytes:
        """Read READY, BEGUN, FAILED, several of them, or nothing if the rank has closed its end."""
        try:
            message = self.line.recv(16)
        except ConnectionResetError:
            return b""
        self._ready = self._ready or READY in message
        self.has_begun = self.has_begun or BEGUN in message
        return message

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. A rank that does not handle SIGINT yet gets SIGTERM instead."""
        if number is signal.SIGINT and not self._is_ready():
            number = signal.SIGTERM
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def has_pending_file(self) -> bool:
        """Whether it runs and is writing a file that must be whole or absent."""
        return self.end is None and self._mark.exists()

    def _is_ready(self) -> bool:
        """Whether READY has been read, or is waiting to be read."""
        if not self._ready:
            with suppress(BlockingIOError, ConnectionResetError):
                message = self.line.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                self._ready = READY in message
        return self._ready

    def record_end(self, ending_by: int | None) -> RankExit:
        """Record how it ended; call when `pidfd` is readable.

        `ending_by`: the last signal that it got in order to end, if any. It cannot be the reason
        of a SIGKILL that came before.

        The process is not reaped yet. Until it is, no other process can get its id and its
        session, so that the rest of that session can be ended safely.
        """
        seen = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert seen is not None
        code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
        stopped = ending_by is not None and (code != -signal.SIGKILL or ending_by == signal.SIGKILL)
        self.end = RankExit(self.number, time.time(), code, stopped, monotonic=time.monotonic())
        return self.end

    def failed_by_itself(self) -> bool:
        """Whether it has failed, and not only because of what another rank did."""
        if (failure := Failure.read(self._record)) is not None:
            return not failure.is_consequence
        # Gloo aborts a rank that receives more than it expects.
        return self.end is not None and self.end.code not in (0, -signal.SIGABRT)

    def is_exiting(self) -> bool:
        """Whether it has failed by itself, and its process has not ended yet."""
        return self.end is None and self.failed_by_itself()

    def reap(self) -> None:
        """Wait for the process, release its id, and remove the draft that it was writing."""
        self._process.wait()
        os.close(self.pidfd)
        self.line.close()
        remove_drafts(self._mark)


@dataclass(frozen=True)
class RankSpec:
    """A rank that is to be started."""

    number: int
    command: Sequence[str]
    """As the interpreter would take it."""
    environ: Mapping[str, str]
    streams: Streams
    store: socket.socket | None
    """What it inherits: rank 0's listening socket, or in an elastic job each rank's socket to the
    driver."""
    plain: bool
    """Whether nothing of the program is divided."""

    @property
    def entry_arguments(self) -> list[str]:
        """The arguments of the rank's entry point after the first one, its socket."""
        buffering = "untouched" if self.streams[0] is None else "lines"
        return [buffering, "plain" if self.plain else "unedited", *self.command]


StartRank = Callable[[RankSpec], RankProcess]


def start_rank(spec: RankSpec) -> RankProcess:
    """Start one rank, which waits for GO. Raises OSError if the operating system refuses."""
    ours, theirs = socket.socketpair()
    worker = python_command("-P", "-m", ENTRY_MODULE)
    with theirs:
        process = subprocess.Popen(
            [*worker, str(theirs.fileno()), *spec.entry_arguments],
            env=spec.environ,
            stdin=None if spec.number == 0 else subprocess.DEVNULL,
            stdout=spec.streams[0],
            stderr=spec.streams[1],
            start_new_session=True,
            pass_fds=[held.fileno() for held in (theirs, spec.store) if held is not None],
        )
    return RankProcess(spec, process, ours)
