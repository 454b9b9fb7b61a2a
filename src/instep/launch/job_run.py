"""A run of a job on this host: start its ranks, supervise them, and say how they ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from instep.distributed.file_limit import allow_open_files, check_file_size
from instep.distributed.identity.launchers import RESTARTS
from instep.distributed.rendezvous.job_fingerprint import JobFingerprint
from instep.launch.errors import StartError
from instep.launch.job import Job
from instep.launch.multi_node.connections import HostResult, SupervisorConnections
from instep.launch.multi_node.hosts import JobInfo, join_hosts
from instep.launch.ranks.output import OutputMode, choose_output
from instep.launch.ranks.rank_process import RankProcess, RankSpec, StartRank, start_rank
from instep.launch.ranks.rank_variables import rank_environment
from instep.launch.ranks.reaper import Reaper, end_ranks
from instep.launch.signals import SignalQueue
from instep.launch.supervisor import INTERRUPTED, Supervisor
from instep.process import settings, storage
from instep.process.exit_status import REQUEUE
from instep.process.failures.last_position import LastPosition
from instep.process.failures.record import (
    Failure,
    RankExit,
    first_failure,
    format_interrupt,
    format_report,
)
from instep.training.checkpoint.resume_point import ResumePoint

_FILES, _FILES_PER_RANK = 64, 8
"""Of this process: its own, and for each rank its descriptor, its socket and the two ends of two
pipes."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    code: int
    """The exit code for the shell."""
    first: Failure | None = None
    """The failure that caused the others."""
    report: str = ""
    """The message about it for this host's stderr."""
    requested_signal: signal.Signals | None = None
    """The signal by which this supervisor, or that of another host, was asked to end."""
    sizes: tuple[int, ...] = ()
    """The number of ranks on each host."""
    lost_nodes: tuple[int, ...] = ()
    """The hosts whose supervisors do not answer any more."""
    resume_point: ResumePoint | None = None
    """The last checkpoint that the job has completed or gone on from."""

    @property
    def requests_requeue(self) -> bool:
        """Whether the job has saved a checkpoint and ended because it was told to."""
        return self.code == REQUEUE

    def print_report(self) -> int:
        """Print the report to stderr and return the exit code."""
        sys.stderr.write(self.report)
        sys.stderr.flush()
        return self.code


def run_job(
    job: Job,
    *,
    started: Callable[[], None],
    folder: Path | None = None,
    start: StartRank = start_rank,
) -> JobResult:
    """Run `job` to its end.

    Args:
        job: the program, the number of ranks and their options.
        started: called once, after all ranks of this host have been started.
        folder: for the job's own files; by default a new one. The reaper removes it if this
            process is killed.
        start: starts the process of a rank.

    The result's code is 0 if every rank on every host ended with 0. Otherwise it is the code of
    the rank that failed first, or 128 + n if signal n ended that rank or asked this process to
    end. Raises LaunchError if the job cannot be started. When it returns, no process of the job
    is left on this host.
    """
    settings.check_variables()
    check_file_size()
    allow_open_files(_FILES + _FILES_PER_RANK * job.size + job.hosts.nodes)
    output = choose_output(job.output, append=job.restarts > 0)
    job_info = join_hosts(
        job.hosts, job.size, job.fingerprint or JobFingerprint.of_command(job.command)
    )
    with SignalQueue() as signal_queue:
        supervisor = Supervisor(signal_queue, SupervisorConnections(job_info))
        own = storage.make_job_folder(job.size) if folder is None else nullcontext(folder)
        with own as files_of_job:
            files = [Path(files_of_job, f"rank{rank}") for rank in range(job.size)]
            starting = _start_ranks(job, job_info, output, files, start)
            _run_ranks(starting, job_info, supervisor, output, files, started)
            failures = [failure for failure in map(Failure.read, files) if failure is not None]
            points = [point for point in map(ResumePoint.read, files) if point is not None]
            ends = [*map(_add_details, supervisor.ends, map(LastPosition, files))]
        signal_queue.restore_defaults()
        output.finish(failures)
        result = supervisor.connections.exchange_results(
            HostResult(ends, failures, points[0] if points else None)
        )
        return _conclude(job, job_info, supervisor, result)


def _add_details(end: RankExit, seen: LastPosition) -> RankExit:
    """Add what the rank's files say about its end."""
    details = seen.describe(end.code, end.monotonic)
    return replace(end, details=details, finished=seen.has_finished())


def _run_ranks(
    starting: Iterator[RankProcess],
    job_info: JobInfo,
    supervisor: Supervisor,
    output: OutputMode,
    files: Sequence[Path],
    started: Callable[[], None],
) -> None:
    """Start the ranks and wait for their end. No process of theirs is left, even on an error."""
    reaper = Reaper(job_info.name, files[0].parent)
    ranks: list[RankProcess] = []
    try:
        with job_info.store or nullcontext():
            for rank in starting:
                ranks.append(rank)
                reaper.add(rank.pid)
                rank.send_go()
        output.start()
        started()
        supervisor.wait(ranks)
    finally:
        end_ranks((rank.pid for rank in ranks), job_info.name)
        for rank in ranks:
            rank.reap()
        reaper.stop()


def _start_ranks(
    job: Job, job_info: JobInfo, output: OutputMode, files: Sequence[Path], start: StartRank
) -> Iterator[RankProcess]:
    """Start one rank after the other; each waits for GO."""
    for local_rank, file in enumerate(files):
        number = job_info.first + local_rank
        held = job_info.store if number == 0 else None
        environ = rank_environment(
            os.environ,
            job_info,
            local_rank=local_rank,
            failure_file=file,
            store_fd=None if held is None else held.fileno(),
        )
        environ |= job.variables(number)
        if job.restarts:
            environ[RESTARTS] = str(job.restarts)
        try:
            rank = start(
                RankSpec(number, job.command, environ, output.streams(number), held, job.plain)
            )
        except OSError as error:
            raise StartError(number, job_info.size, error.strerror or str(error)) from None
        yield rank


def _conclude(job: Job, job_info: JobInfo, supervisor: Supervisor, result: HostResult) -> JobResult:
    requested_signal, sizes = supervisor.requested_signal, job_info.sizes
    first = first_failure(result.ends, result.failures)
    lost = {failure.rank for failure in result.failures if failure.lost_host}
    known = JobResult(
        0,
        requested_signal=requested_signal,
        sizes=sizes,
        lost_nodes=tuple(k for k in range(len(sizes)) if sum(sizes[:k]) in lost),
        resume_point=result.resume_point,
    )
    if first is None or (requested_signal is not None and first.code == REQUEUE):
        return known if first is None else replace(known, code=REQUEUE)
    is_killed = bool(lost) or any(end.code < 0 for end in result.ends)
    ends_by_it = supervisor.signalled_again and (is_killed or not first.raised)
    if requested_signal is not None and (first.code in INTERRUPTED or ends_by_it):
        is_shown = job_info.first == 0 or job.hosts.has_own_terminal
        report = format_interrupt(requested_signal, first, result.ends) if is_shown else ""
        code = 128 + requested_signal if is_killed else first.code  # else the script has chosen it
        return replace(known, code=code, report=report)
    host = "" if job_info.one_host else job_info.host_of(first.rank)
    text = format_report(first, result.ends, job_info.size, host, result.failures)
    is_here = job_info.first <= first.rank < job_info.first + job.size
    if not (is_here or job.hosts.has_own_terminal):  # one terminal shows the traceback once
        text = text.split("\n")[0] + "\n"
    return replace(known, code=first.exit_code, first=first, report=text)
