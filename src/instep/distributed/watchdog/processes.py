"""What can be seen of another process from outside, without asking it."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from contextlib import suppress

_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO of Linux 6.13, with a struct of 64 bytes."""
_EXIT = 8
"""PIDFD_INFO_EXIT of Linux 6.15: ask for, and get, the exit status."""


def exit_code(pidfd: int) -> int | None:
    """The exit code of a process that has ended, -n for signal n.

    None where nobody but its parent is told: before Linux 6.15, once it is reaped.
    """
    status = _status(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _status(pidfd: int) -> int | None:
    found = _exit_info(pidfd)
    if found is None:
        found = _status_of_zombie(pidfd)
    return _exit_info(pidfd) if found is None else found  # reaped in between


def _exit_info(pidfd: int) -> int | None:
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _EXIT)
    with suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, info)
        if struct.unpack_from("Q", info)[0] & _EXIT:
            return int(struct.unpack_from("i", info, 60)[0])
    return None


def _status_of_zombie(pidfd: int) -> int | None:
    with suppress(OSError), open(f"/proc/self/fdinfo/{pidfd}") as file:
        pid = next(line.split()[1] for line in file if line.startswith("Pid:"))
        state, *fields = _stat(pid)
        if state == "Z":
            return int(fields[-1])
    return None


def _stat(pid: int | str) -> list[str]:
    """The fields from the state on."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def activity(pid: int) -> tuple[int, int]:
    """How often the main thread was put to sleep, and how long all threads ran (clock ticks).

    A main thread whose first number stays the same while it sleeps has not run in between: it is
    in the same system call. Raises OSError for a process that has ended.
    """
    switches = 0
    with open(f"/proc/{pid}/task/{pid}/status") as file:
        for line in file:
            if "ctxt_switches" in line:
                switches += int(line.split()[1])
    fields = _stat(pid)
    return switches, int(fields[11]) + int(fields[12])


def descendants(pid: int) -> set[int]:
    """What a process has started, and what these have started, but for this process."""
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            found.update(map(int, file.read().split()))
    found.discard(os.getpid())
    for child in list(found):
        with suppress(OSError):
            found |= descendants(child)
    return found


def kill(pidfd: int) -> None:
    """End it, whatever it does."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
