"""Nothing of a job is left behind: find its processes, end them; and the guard that does so
when the supervisor itself was killed.

This module is also the guard's program. It runs isolated from the user's Python path, so that it
imports only the standard library, and little of that, since it starts beside the ranks; and under
a name of its own, so that `pkill -f "instep run"` does not end it together with the supervisor.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from instep.process import isolated_command
from instep.process.procfs import read_environ, read_stat, set_process_name

TERM_TIMEOUT = 0.5
"""Seconds that what a rank left behind has to end after SIGTERM."""
KILL_TIMEOUT = 5.0
"""Seconds within which SIGKILL takes effect, or the process is stuck in the kernel."""
DONE = b"done"


def end_ranks(leaders: Iterable[int], job: str) -> None:
    """Kill the ranks, then end whatever else is of this job: SIGTERM first, soon SIGKILL.

    A process is of the job if it is in the session of one of its `leaders`, or was started with
    INSTEP_JOB of this job or of a job inside it. Returns when there is none.
    """
    sessions = frozenset(leaders)
    _signal_all(_open_pidfds(sessions), signal.SIGKILL, KILL_TIMEOUT)
    _signal_all(_find_processes(sessions, job), signal.SIGTERM, TERM_TIMEOUT)
    while _signal_all(_find_processes(sessions, job), signal.SIGKILL, KILL_TIMEOUT):
        pass


def _open_pidfds(pids: Iterable[int]) -> list[int]:
    """A file descriptor for each process that still exists."""
    opened = []
    for pid in pids:
        try:
            opened.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    return opened


def _find_processes(sessions: frozenset[int], job: str) -> list[int]:
    """The processes of the job that are alive, each as a file descriptor."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        for pidfd in _open_pidfds([int(name)]):
            if _is_alive_member(name, sessions, job):
                found.append(pidfd)
            else:
                os.close(pidfd)
    return found


def _is_alive_member(pid: str, sessions: frozenset[int], job: str) -> bool:
    try:
        stat = read_stat(pid)
        if not stat.is_alive():
            return False
        return stat.session in sessions or f"{read_environ(pid).get('INSTEP_JOB')}.".startswith(
            f"{job}."
        )
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _signal_all(pidfds: list[int], number: int, timeout: float) -> bool:
    """Send, then wait until all have ended; False when there was none or one did not end."""
    poll = select.poll()
    for pidfd in pidfds:
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, number)
        poll.register(pidfd, select.POLLIN)
    alive = set(pidfds)
    deadline = time.monotonic() + timeout
    while alive and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left * 1000):
            poll.unregister(pidfd)
            alive.remove(pidfd)
    for pidfd in pidfds:
        os.close(pidfd)
    return bool(pidfds) and not alive


class Reaper:
    """A small process that outlives the supervisor's sudden death, and nothing else."""

    def __init__(self, job: str, folder: os.PathLike[str]) -> None:
        """Start it. Should the supervisor die, it ends the job and removes `folder`."""
        import subprocess

        self._process = subprocess.Popen(
            isolated_command("instep.launch.reaper", job, os.fspath(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )

    def add(self, leader: int) -> None:
        """From now on it also answers for the session of this rank."""
        self._write(f"{leader}\n".encode())

    def stop(self) -> None:
        """The job is over and nothing of it is left. Returns when the guard has ended."""
        self._write(DONE)
        self._process.communicate()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed the guard: the job goes on without it
            self._process.stdin.write(line)


def main(job: str, folder: str) -> None:
    """The guard's program: wait for the supervisor's end, and do what it could not do."""
    set_process_name("instep-reaper")
    leaders = sys.stdin.buffer.read().split()
    if DONE not in leaders:
        import shutil

        end_ranks(map(int, leaders), job)
        shutil.rmtree(folder, ignore_errors=True)
