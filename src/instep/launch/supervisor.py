"""The supervisor of a job on this host: start the ranks, wait, end them together."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from instep.errors import StartError
from instep.failure import End, Failure, first_failure, report
from instep.launch.environment import Meeting, job_name, rank_environment, threads_per_rank
from instep.launch.guard import Guard, end_ranks
from instep.launch.job import Job
from instep.launch.line import FAILED
from instep.launch.output import Output, choose_output
from instep.launch.rank import Rank, start_rank
from instep.launch.signals import Mailbox


@dataclass(frozen=True)
class Step:
    """One step of ending a job."""

    signal: signal.Signals | None
    """What every rank that is still there gets; None: nothing yet."""
    patience: float
    """Seconds until the next step."""


KILL = Step(signal.SIGKILL, float("inf"))
AFTER_FAILURE = (
    Step(None, 0.1),  # those who fail for the same reason may still say so
    Step(signal.SIGTERM, 1.0),
    KILL,
)
AFTER_SIGNAL = {
    signal.SIGINT: (Step(signal.SIGINT, 5.0), Step(signal.SIGTERM, 1.0), KILL),
    signal.SIGTERM: (Step(signal.SIGTERM, 30.0), KILL),  # time to write a checkpoint
    signal.SIGHUP: (Step(signal.SIGTERM, 30.0), KILL),
}


def run(job: Job, *, started: Callable[[], None]) -> int:
    """Run `job` to its end and return the exit code for the shell.

    `started` is called once, when all ranks have been started.

    That is 0 when every rank ended with 0; the code of the rank that failed first, or 128 + n
    where signal n ended it; 128 + n also when this process was asked to end by signal n. Reports
    a failure on stderr. Raises CommandLineError or StartError when the job cannot be started.
    When it returns, no process of the job is left.
    """
    output = choose_output(job.output)
    with Mailbox() as mailbox:
        watch = Watch(mailbox)
        with tempfile.TemporaryDirectory(prefix="instep-") as folder:
            files = [Path(folder, f"rank{rank}") for rank in range(job.size)]
            _run_ranks(job, watch, output, files, started)
            failures = [failure for failure in map(Failure.read, files) if failure is not None]
        mailbox.obey()
        output.finish(failures)
        return _conclude(watch, failures)


def _run_ranks(
    job: Job, watch: Watch, output: Output, files: Sequence[Path], started: Callable[[], None]
) -> None:
    """Start the ranks and wait for their end; nothing of them is left, whatever happens."""
    name = job_name(os.environ)
    guard = Guard(name, files[0].parent)
    ranks: list[Rank] = []
    try:
        with _reserve() as store:
            for rank in _start_ranks(job, name, store, output, files):
                ranks.append(rank)
                guard.watch(rank.pid)
                rank.go()
        output.begin()
        started()
        watch.until_ended(ranks)
    finally:
        end_ranks((rank.pid for rank in ranks), name)
        for rank in ranks:
            rank.reap()
        guard.dismiss()


def _start_ranks(
    job: Job, name: str, store: socket.socket, output: Output, files: Sequence[Path]
) -> Iterator[Rank]:
    """Each rank in its turn, waiting for its `go`."""
    port = store.getsockname()[1]
    meeting = Meeting(name, job.size, port, threads_per_rank(job.size))
    for number, file in enumerate(files):
        held = store if number == 0 else None
        environ = rank_environment(
            os.environ,
            meeting,
            rank=number,
            failure_file=file,
            store_fd=None if held is None else held.fileno(),
        )
        try:
            rank = start_rank(
                number, job.command, environ, output.streams(number), held, plain=job.plain
            )
        except OSError as error:
            raise StartError(number, job.size, error.strerror or str(error)) from None
        yield rank


def _reserve() -> socket.socket:
    """A socket for rank 0 to meet the others at: on loopback, on a port that is nobody else's.

    Bound, not listening: a script that calls init_process_group itself can still bind the port.
    """
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    store.bind(("127.0.0.1", 0))
    return store


def _conclude(watch: Watch, failures: Sequence[Failure]) -> int:
    if watch.asked is not None:
        return 128 + watch.asked
    first = first_failure(watch.ends, failures)
    if first is None:
        return 0
    sys.stderr.write(report(first, watch.ends))
    sys.stderr.flush()
    return first.exit_code


class Watch:
    """Wait for the ranks, and end them when one fails or when we are asked to end."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.asked: signal.Signals | None = None
        """The signal that asked this job to end, before any rank had failed."""
        self._ranks: Sequence[Rank] = ()
        self._steps: list[Step] | None = None
        """What is still to be done to end the job; None while it shall go on."""
        self._stopping = False
        """Whether any rank was told to end."""
        self._deadline = float("inf")
        self._selector = selectors.DefaultSelector()
        self._mailbox = mailbox
        self._on(mailbox, self._signalled)

    @property
    def ends(self) -> list[End]:
        """How the ranks ended, in their order."""
        return [rank.end for rank in self._ranks if rank.end is not None]

    def until_ended(self, ranks: Sequence[Rank]) -> None:
        """Return when all `ranks` have ended."""
        self._ranks = ranks
        for rank in ranks:
            self._on(rank.pidfd, partial(self._ended, rank))
            self._on(rank.line, partial(self._said, rank))
        while len(self.ends) < len(ranks):
            for key, _ in self._selector.select(self._time_left()):
                key.data()
            if time.monotonic() >= self._deadline:
                self._next_step()

    def _on(self, source: int | socket.socket | Mailbox, react: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _time_left(self) -> float | None:
        if self._deadline == float("inf"):
            return None
        return max(0.0, self._deadline - time.monotonic())

    def _ended(self, rank: Rank) -> None:
        self._selector.unregister(rank.pidfd)
        if rank.see_end(stopped=self._stopping).code != 0:
            self._end_job(AFTER_FAILURE)

    def _said(self, rank: Rank) -> None:
        said = rank.listen()
        if not said:
            self._selector.unregister(rank.line)
        if FAILED in said:
            self._end_job(AFTER_FAILURE)

    def _signalled(self) -> None:
        for number in self._mailbox.take():
            if self._steps is None:
                self.asked = number
                self._end_job(AFTER_SIGNAL[number])
            else:
                self._next_step()

    def _end_job(self, steps: Sequence[Step]) -> None:
        """Begin with the first of `steps`, unless the end has begun already."""
        if self._steps is None:
            self._steps = list(steps)
            self._next_step()

    def _next_step(self) -> None:
        if not self._steps:
            return
        step = self._steps.pop(0)
        self._deadline = time.monotonic() + step.patience
        if step.signal is not None:
            self._stopping = True
            for rank in self._ranks:
                if rank.end is None:
                    rank.signal(step.signal)
