"""End all processes of a job: by the supervisor, or by the reaper if the supervisor was killed.

This module is also the reaper's program. It runs isolated from the user's Python path and imports
little, because it starts beside the ranks. It has a process name of its own, so that
`pkill -f "instep run"` does not end it together with the supervisor.
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
"""Seconds that processes which a rank left behind have to end after SIGTERM."""
KILL_TIMEOUT = 5.0
"""Seconds after SIGKILL, after which the process counts as stuck in the kernel."""
DONE = b"done"


def end_ranks(leaders: Iterable[int], job: str) -> None:
    """Kill the ranks, then end all other processes of the job: first SIGTERM, then SIGKILL.

    A process belongs to the job if its session has one of the `leaders`, or if its INSTEP_JOB
    names this job or a job inside of it. Returns when none is left.
    """
    sessions = frozenset(leaders)
    _signal_all(_open_members(sessions, sessions, job), signal.SIGKILL, KILL_TIMEOUT)
    _signal_all(_open_members(_all_pids(), sessions, job), signal.SIGTERM, TERM_TIMEOUT)
    while _signal_all(_open_members(_all_pids(), sessions, job), signal.SIGKILL, KILL_TIMEOUT):
        pass


def _all_pids() -> Iterable[int]:
    return map(int, filter(str.isdecimal, os.listdir("/proc")))


def _open_members(pids: Iterable[int], sessions: frozenset[int], job: str) -> list[int]:
    """A file descriptor for each of these processes that lives and belongs to the job."""
    opened = []
    for pid in pids:
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if _is_alive_member(pid, sessions, job):  # its id may be that of an ended one
                opened.append(pidfd)
            else:
                os.close(pidfd)
    return opened


def _is_alive_member(pid: int, sessions: frozenset[int], job: str) -> bool:
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
    """Send a signal and wait until all have ended. False if there was none, or one did not end."""
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
    """A small process that ends the job's processes if the supervisor is killed."""

    def __init__(self, job: str, folder: os.PathLike[str]) -> None:
        """Start the process; it also removes `folder` if the supervisor dies."""
        import subprocess

        self._process = subprocess.Popen(
            isolated_command("instep.launch.ranks.reaper", job, os.fspath(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )

    def add(self, leader: int) -> None:
        """Add the session of this rank to those that the reaper ends."""
        self._write(f"{leader}\n".encode())

    def stop(self) -> None:
        """Tell the reaper that nothing of the job is left. Returns when the reaper has ended."""
        self._write(DONE)
        self._process.communicate()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the reaper was killed: the job goes on without it
            self._process.stdin.write(line)


def main(job: str, folder: str) -> None:
    """The reaper's program: wait for the supervisor's end, then end what is left of the job."""
    set_process_name("instep-reaper")
    leaders = sys.stdin.buffer.read().split()
    if DONE not in leaders:
        import shutil

        end_ranks(map(int, leaders), job)
        shutil.rmtree(folder, ignore_errors=True)
