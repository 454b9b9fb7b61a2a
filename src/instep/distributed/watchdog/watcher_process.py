"""The process of a rank's watcher: the descriptors that it inherits, and its start."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from multiprocessing import parent_process

from instep.distributed.flight_record.recorder import recorder
from instep.distributed.identity.launchers import FAILURE_FILE, JOB, launcher_process
from instep.distributed.watchdog.connection import Connection
from instep.distributed.watchdog.stalls import python_stacks
from instep.process import isolated_command
from instep.process.failures.last_position import LastPosition, enable_faulthandler


def open_position_file() -> int:
    """The file for this rank's line: for `instep run`, or for the watcher alone."""
    path = os.environ.get(FAILURE_FILE)
    if path is None:
        return os.memfd_create("seen")
    return os.open(LastPosition(path).line_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def open_inherited(pid: int, position: int, listener: object) -> dict[str, int]:
    """Descriptors that the watcher of this process inherits, by their names in its first message.

    `position`: the descriptor of the file for this rank's line. `listener`: the hub's socket, if
    there is one, which is detached.
    """
    opened = {"pidfd": os.pidfd_open(pid), "seen": os.dup(position)}
    opened["record"] = os.dup(recorder.file_descriptor())
    stacks = python_stacks.stack_file()
    if stacks is not None:
        opened["stacks"] = os.dup(stacks)
    if JOB not in os.environ:
        opened["crash"] = os.dup(_crash_file())
        with suppress(ProcessLookupError):
            if (launcher := _launcher_process()) is not None:
                opened["launcher"] = os.pidfd_open(launcher)
    if isinstance(listener, socket.socket):
        opened["listener"] = listener.detach()
    return opened


def start_process(passed: Collection[int]) -> tuple[int, Connection]:
    """The id of a new watcher, and the connection to it. Only the watcher has the descriptors that
    are passed to it then."""
    ours, theirs = socket.socketpair()
    with theirs:
        watcher = subprocess.Popen(
            isolated_command("instep.distributed.watchdog.watcher", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *passed),
            cwd="/",
            start_new_session=True,
        )
    watcher.returncode = 0  # it outlives this rank, of which Popen would warn
    for fd in passed:
        os.close(fd)
    return watcher.pid, Connection(ours)


def _launcher_process() -> int | None:
    """The process without which this rank is not to go on, where that is known."""
    parent = parent_process()
    return launcher_process() or (None if parent is None else parent.pid)


@cache
def _crash_file() -> int:
    """The file for Python's report of a fatal signal, which the watcher reads."""
    fd = os.memfd_create("crash")
    enable_faulthandler(fd)
    return fd
