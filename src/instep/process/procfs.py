"""Other processes of this host, and the host's identity: /proc and process descriptors.

The standard library only, and little of it: the watchers and the guard of a job import this.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

_PIDFD_GET_INFO = 0xC040FF0B
"""Since Linux 6.13, with a struct of 64 bytes."""
_PIDFD_INFO_EXIT = 8
"""Since Linux 6.15: ask for, and get, the exit status."""

CREDENTIALS = struct.Struct("iII")
"""`struct ucred`: process, user and group, as a Unix socket tells them of its other end."""


class ProcessStat(NamedTuple):
    """Fields of /proc/<pid>/stat."""

    state: str
    parent: int
    session: int
    cpu_ticks: int
    """User and system time of all threads."""
    start_time: int
    """In clock ticks since the boot."""
    exit_status: int
    """Of a zombie: what waitpid would return."""

    def is_alive(self) -> bool:
        """Whether it is neither a zombie nor dead."""
        return self.state not in "ZX"


def read_stat(pid: int | str) -> ProcessStat:
    """Raises FileNotFoundError or ProcessLookupError where there is no such process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].decode().split()  # its name may hold spaces
    parent, session, user, system, start, status = (
        int(fields[number - 3])
        for number in (4, 6, 14, 15, 22, 52)  # numbers of proc(5)
    )
    return ProcessStat(fields[0], parent, session, user + system, start, status)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    with suppress(OSError):
        return read_stat(pid).is_alive()
    return False


def read_environ(pid: int | str) -> dict[str, str]:
    """The environment with which a process was started; empty for another user's process.

    Raises FileNotFoundError or ProcessLookupError where there is no such process.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().decode(errors="replace").split("\0")
    except PermissionError:
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def command_line(pid: int) -> list[str]:
    """The words with which a process was started; empty where it may not be seen."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().decode(errors="replace").split("\0")[:-1]
    return []


def environ_size(environ: Mapping[str, str]) -> int:
    """The bytes that these variables take in the memory of a process."""
    return len(_encode(environ))


def replace_environ(environ: Mapping[str, str]) -> None:
    """Replace this process's environment, and what other processes read of it in /proc.

    That is the memory in which the process was started with its variables. The C library copies a
    variable that is set later, so that after this nothing points there. Raises ValueError, and
    changes nothing, if there is not enough room.
    """
    import ctypes  # takes time that the watchers of a job do not have

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    begin, end = int(fields[50 - 3]), int(fields[51 - 3])  # numbers of proc(5)
    text = _encode(environ)
    if len(text) > end - begin:
        raise ValueError(f"{len(text)} bytes of variables, and room for {end - begin}")
    os.environ.clear()
    os.environ.update(environ)
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _encode(environ: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}\0") for name, value in environ.items())


def children(pid: int) -> set[int]:
    """The child processes of all threads of a process; empty where they cannot be seen."""
    found: set[int] = set()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def descendants(pid: int) -> set[int]:
    """The children of a process, their children and so on, except for this process."""
    found = children(pid) - {os.getpid()}
    return found.union(*map(descendants, found))


def threads(name: str) -> list[int]:
    """The ids of this process's threads of a name (its first 15 bytes)."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            if file.read().rstrip("\n") == name:
                found.append(int(thread))
    return found


def memory_size() -> int:
    """The bytes of memory and swap that the processes of this host, or container, have together."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    size = sum(int(fields[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(size, int(file.read()))
    except (OSError, ValueError):
        return size


def context_switches(pid: int) -> int:
    """How often the main thread was put to sleep or preempted.

    A main thread that sleeps, and whose number has not changed, has not run in between: it is in
    the same system call. Raises OSError for a process that has ended.
    """
    with open(f"/proc/{pid}/task/{pid}/status") as file:
        return sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)


def handles_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for that signal."""
    with suppress(OSError, ValueError):
        return bool(int(_status_field(pid, "SigCgt"), 16) >> (number - 1) & 1)
    return False


def tracer(pid: int) -> int:
    """The process that debugs this one; 0 where there is none."""
    with suppress(OSError, ValueError):
        return int(_status_field(pid, "TracerPid"))
    return 0


def memory_in_use(pid: int) -> int:
    """The memory of a process that is in RAM. Raises OSError for a process that has ended."""
    return int((_status_field(pid, "VmRSS") or "0").split()[0]) * 1024


def wait_channel(pid: int) -> str:
    """The kernel's function in which the main thread sleeps; empty where it may not be seen."""
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/wchan") as file:
        return file.read().strip("0")
    return ""


def current_folder(pid: int) -> str:
    """The current folder of a process; empty where it may not be seen."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return ""


def _status_field(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def set_process_name(name: str) -> None:
    """The name of this process in `ps` and `top`."""
    with open("/proc/self/comm", "w") as file:
        file.write(name)


def close_stderr() -> None:
    """Launchers wait until all processes have closed it."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)


# --------------------------------------------------------------------------------- the host


def boot_id() -> str:
    """The kernel's id of this boot, equal in all processes, containers included."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def namespace(name: str) -> int:
    """The number of this process's namespace, such as "pid" or "net"."""
    return os.stat(f"/proc/self/ns/{name}").st_ino


def pid_space() -> str:
    """Equal in two processes that see each other under the same process ids."""
    return f"{boot_id()} {namespace('pid')}"


# ---------------------------------------------------------------------- process descriptors


def exit_code(pidfd: int) -> int | None:
    """The exit code of a process that has ended, -n for signal n.

    None where only its parent can know: before Linux 6.15, once it is reaped.
    """
    status = _exit_info(pidfd)
    if status is None:
        status = _status_of_zombie(pidfd)
    if status is None:
        status = _exit_info(pidfd)  # reaped in between
    return None if status is None else os.waitstatus_to_exitcode(status)


def _exit_info(pidfd: int) -> int | None:
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    with suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
            return int(struct.unpack_from("i", info, 60)[0])
    return None


def _status_of_zombie(pidfd: int) -> int | None:
    with suppress(OSError), open(f"/proc/self/fdinfo/{pidfd}") as file:
        stat = read_stat(next(line.split()[1] for line in file if line.startswith("Pid:")))
        if stat.state == "Z":
            return stat.exit_status
    return None


def has_ended(pidfd: int, timeout: float = 0) -> bool:
    """Whether a process has ended, or does within `timeout` seconds; it may be a zombie."""
    return bool(select.select([pidfd], [], [], timeout)[0])


def kill(pidfd: int) -> None:
    """Send SIGKILL; a process that has ended is left alone."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def process_address() -> str:
    """The address of this process for `ProcessHandle`."""
    return f"{pid_space()} {os.getpid()}"


class ProcessHandle:
    """A process by its address; one on another host always seems to run."""

    def __init__(self, address: str) -> None:
        space, _, pid = address.rpartition(" ")
        self._ended = False
        self._pidfd: int | None = None
        if space == pid_space():
            try:
                self._pidfd = os.pidfd_open(int(pid))
            except ProcessLookupError:
                self._ended = True

    def has_ended(self) -> bool:
        """Whether the process has ended; it may be a zombie."""
        if self._pidfd is not None and not self._ended:
            self._ended = has_ended(self._pidfd)
        return self._ended

    def close(self) -> None:
        """Give the process descriptor back."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
