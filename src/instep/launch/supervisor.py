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
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from instep.distributed.rendezvous.job_fingerprint import Card
from instep.launch.control_bytes import FAILED
from instep.launch.environment import rank_environment
from instep.launch.errors import StartError
from instep.launch.guard import Guard, end_ranks
from instep.launch.job import Job
from instep.launch.multihost import links
from instep.launch.multihost.hosts import Party, gather
from instep.launch.multihost.links import Links, Message, Outcome
from instep.launch.output import Output, choose_output
from instep.launch.rank import Rank, start_rank
from instep.launch.signals import Mailbox
from instep.process import settings, storage, unfinished_files
from instep.process.failure import End, Failure, first_failure, report
from instep.process.last_seen import LastSeen


@dataclass(frozen=True)
class Step:
    """One step of ending a job."""

    signal: signal.Signals | None
    """What every rank that is still there gets; None: nothing yet."""
    patience: float
    """Seconds until the next step."""


KILL = Step(signal.SIGKILL, float("inf"))
LOOK = 0.05
"""Seconds between two looks whether a rank has written its file."""
AFTER_FAILURE = (
    Step(None, 0.1),  # those who fail for the same reason may still say so
    Step(signal.SIGTERM, 1.0),
    KILL,
)
AFTER_INTERRUPT = (
    Step(None, 30.0),  # one rank has ended by it; another may still write a checkpoint
    Step(signal.SIGTERM, 1.0),
    KILL,
)
AFTER_SIGNAL = {
    # The script may catch it and go on, as long as it likes, or until the second.
    signal.SIGINT: (Step(signal.SIGINT, float("inf")), Step(signal.SIGTERM, 1.0), KILL),
    signal.SIGTERM: (Step(signal.SIGTERM, 30.0), KILL),  # time to write a checkpoint
    signal.SIGHUP: (Step(signal.SIGTERM, 30.0), KILL),
}


INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT, -signal.SIGTERM)
"""How a rank ends that was interrupted; the last, if it had not begun."""


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    code: int
    """For the shell."""
    first: Failure | None = None
    """The failure that the others followed from."""
    report: str = ""
    """What to say of it on this host."""
    asked: signal.Signals | None = None
    """The signal that asked this process, or that of another host, to end."""

    def told(self) -> int:
        """The code, once what is to be said was printed."""
        sys.stderr.write(self.report)
        sys.stderr.flush()
        return self.code


def run(job: Job, *, started: Callable[[], None], folder: Path | None = None) -> Result:
    """Run `job` to its end.

    `started` is called once, when all ranks of this host have been started. `folder` is for the
    job's own files, removed with it should this process be killed; unless given, a new one.

    The code is 0 when every rank, on every host, ended with 0; that of the rank that failed
    first, or 128 + n where signal n ended it; 128 + n also when this process was asked to end by
    signal n. Raises LaunchError when the job cannot be started. When it returns, no process of
    the job is left on this host.
    """
    settings.check()
    output = choose_output(job.output)
    party = gather(job.hosts, job.size, job.card or Card.of_command(job.command))
    with Mailbox() as mailbox:
        watch = Watch(mailbox, Links(party))
        with _new_folder(job.size) if folder is None else nullcontext(folder) as files_of_job:
            files = [Path(files_of_job, f"rank{rank}") for rank in range(job.size)]
            _run_ranks(job, party, watch, output, files, started)
            failures = [failure for failure in map(Failure.read, files) if failure is not None]
            ends = [_told(end, LastSeen(file)) for end, file in zip(watch.ends, files, strict=True)]
        mailbox.obey()
        output.finish(failures)
        whole = watch.links.conclude(Outcome(ends, failures))
        return _conclude(job, party, watch, whole)


def _told(end: End, seen: LastSeen) -> End:
    """With what the rank's files say of its end."""
    return replace(end, told=seen.told(end.code, end.time), left=seen.left())


def _new_folder(ranks: int) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="instep-", dir=storage.folder(ranks))


def _run_ranks(
    job: Job,
    party: Party,
    watch: Watch,
    output: Output,
    files: Sequence[Path],
    started: Callable[[], None],
) -> None:
    """Start the ranks and wait for their end; nothing of them is left, whatever happens."""
    guard = Guard(party.name, files[0].parent)
    ranks: list[Rank] = []
    try:
        with party.store or nullcontext():
            for rank in _start_ranks(job, party, output, files):
                ranks.append(rank)
                guard.watch(rank.pid)
                rank.go()
        output.begin()
        started()
        watch.until_ended(ranks)
    finally:
        end_ranks((rank.pid for rank in ranks), party.name)
        for rank, file in zip(ranks, files, strict=False):
            rank.reap()
            unfinished_files.tidy(unfinished_files.mark_at(file))
        guard.dismiss()


def _start_ranks(job: Job, party: Party, output: Output, files: Sequence[Path]) -> Iterator[Rank]:
    """Each rank in its turn, waiting for its `go`."""
    for local_rank, file in enumerate(files):
        number = party.first + local_rank
        held = party.store if number == 0 else None
        environ = rank_environment(
            os.environ,
            party,
            local_rank=local_rank,
            failure_file=file,
            store_fd=None if held is None else held.fileno(),
        )
        environ |= job.variables(number)
        try:
            rank = start_rank(
                number, job.command, environ, output.streams(number), held, plain=job.plain
            )
        except OSError as error:
            raise StartError(number, party.size, error.strerror or str(error)) from None
        yield rank


def _conclude(job: Job, party: Party, watch: Watch, whole: Outcome) -> Result:
    asked, first = watch.asked, first_failure(whole.ends, whole.failures)
    if asked is not None and (watch.insisted or (first is not None and first.code in INTERRUPTED)):
        return Result(128 + asked, asked=asked)
    if first is None:
        return Result(0, asked=asked)
    text = report(first, whole.ends, party.size)
    here = party.first <= first.rank < party.first + job.size
    if not (here or job.hosts.by_hand):  # who started the hosts shows the traceback once
        text = text.split("\n")[0] + "\n"
    return Result(first.exit_code, first, text, asked)


class Watch:
    """Wait for the ranks, and end them when one fails or when we are asked to end."""

    def __init__(self, mailbox: Mailbox, links: Links) -> None:
        self.links = links
        self.asked: signal.Signals | None = None
        """The signal that asked this job to end, before any rank had failed."""
        self.insisted = False
        """Whether it was asked by more than one SIGINT, which a script may survive."""
        self._ranks: Sequence[Rank] = ()
        self._steps: list[Step] | None = None
        """What is still to be done to end the job; None while it shall go on."""
        self._may_survive = False
        """Whether the ranks were interrupted, once, and nothing has failed for another reason."""
        self._stopping = False
        """Whether any rank was told to end."""
        self._deadline = float("inf")
        self._patient_until = 0.0
        """Until when ranks that are writing a file are not told to end."""
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
        for node, line in self.links.lines.items():
            self._on(line, partial(self._heard, node, line))
        while len(self.ends) < len(ranks):
            for key, _ in self._selector.select(self._time_left()):
                key.data()
            if time.monotonic() >= self._deadline and not self._waits_for_a_file():
                self._next_step()

    def _waits_for_a_file(self) -> bool:
        """Whether a rank is writing a file that it may finish before the next step."""
        now = time.monotonic()
        if now < self._patient_until and any(rank.is_writing() for rank in self._ranks):
            self._deadline = now + LOOK
            return True
        return False

    def _on(self, source: int | socket.socket | Mailbox, react: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _time_left(self) -> float | None:
        if self._deadline == float("inf"):
            return None
        return max(0.0, self._deadline - time.monotonic())

    def _ended(self, rank: Rank) -> None:
        self._selector.unregister(rank.pidfd)
        if (code := rank.see_end(stopped=self._stopping).code) != 0:
            self._failing(AFTER_INTERRUPT if code in INTERRUPTED else AFTER_FAILURE)

    def _said(self, rank: Rank) -> None:
        said = rank.listen()
        if not said:
            self._selector.unregister(rank.line)
        if FAILED in said:
            self._failing(AFTER_INTERRUPT)

    def _heard(self, node: int, line: socket.socket) -> None:
        messages = self.links.hear(node)
        if node not in self.links.lines:
            self._selector.unregister(line)
        for message in messages:
            if "asked" in message:
                self._ask(signal.Signals(message["asked"]))
            else:
                self._failing(AFTER_FAILURE)

    def _signalled(self) -> None:
        for number in self._mailbox.take():
            if self._steps is None:
                self._ask(number)
            else:
                self.insisted = self.asked is not None
                self._may_survive = False
                self.links.say(links.FAILING)
                self._next_step()

    def _ask(self, number: signal.Signals) -> None:
        if self._steps is None:
            self.asked = number
            self._may_survive = number is signal.SIGINT
            self.insisted = not self._may_survive
            self._end_job(AFTER_SIGNAL[number], links.asked(number))

    def _failing(self, after_interrupt: Sequence[Step]) -> None:
        """A rank has failed. After a SIGINT, which the others may have survived, these steps."""
        if not self._may_survive:
            self._end_job(AFTER_FAILURE)
        elif after_interrupt is AFTER_FAILURE or self._deadline == float("inf"):
            self._may_survive = after_interrupt is not AFTER_FAILURE
            self._steps = list(after_interrupt)
            self._next_step()

    def _end_job(self, steps: Sequence[Step], why: Message = links.FAILING) -> None:
        """Begin with the first of `steps`, unless the end has begun already."""
        if self._steps is None:
            self._steps = list(steps)
            if steps is AFTER_FAILURE:
                self._patient_until = time.monotonic() + unfinished_files.LIMIT
            self.links.say(why)
            self._next_step()

    def _next_step(self) -> None:
        if not self._steps:
            return
        step = self._steps.pop(0)
        self._deadline = time.monotonic() + step.patience
        if step.signal is not None:
            self._stopping = step.signal is not signal.SIGINT
            for rank in self._ranks:
                if rank.end is None:
                    rank.signal(step.signal)
