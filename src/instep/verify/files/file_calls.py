"""Linux's system calls that may change files: a filter for them, and the paths that they name.

A process that has the filter, and what it starts, wait in these calls until another process has
answered. It needs no privileges and cannot be undone. See seccomp(2) and seccomp_unotify(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from instep.process.pending_writes import WRITE_FLAGS

_AT_FDCWD = -100
_NO_NEW_PRIVS, _CHILD_SUBREAPER = 38, 36
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_PATH_MAX = 4096


@dataclass(frozen=True)
class _CallKind:
    """Which arguments of a system call are paths."""

    paths: tuple[tuple[int | None, int], ...]
    """For each: the argument with the directory's descriptor, and that with the path."""
    flags: int | None = None
    """The argument with flags of open(2); None: the call changes something without such flags."""
    follows: bool = False
    """Whether a link at the last name is followed."""
    moves: bool = False


_AT, _PLAIN = ((0, 1),), ((None, 0),)
_OPENS, _OPENS_AT = _CallKind(_PLAIN, 1, follows=True), _CallKind(_AT, 2, follows=True)
_FOLLOWS, _FOLLOWS_AT = _CallKind(_PLAIN, follows=True), _CallKind(_AT, follows=True)
_NAMES, _NAMES_AT = _CallKind(_PLAIN), _CallKind(_AT)
_TWO, _TWO_AT = ((None, 0), (None, 1)), ((0, 1), (2, 3))
_MOVES, _MOVES_AT = _CallKind(_TWO, moves=True), _CallKind(_TWO_AT, moves=True)
_LINKS, _LINKS_AT = _CallKind(_TWO), _CallKind(_TWO_AT)
_SYMLINKS, _SYMLINKS_AT = _CallKind(((None, 1),)), _CallKind(((1, 2),))


def _by_number(*rows: tuple[_CallKind, Sequence[int]]) -> dict[int, _CallKind]:
    return {number: kind for kind, numbers in rows for number in numbers}


_CALLS: dict[str, tuple[int, int, dict[int, _CallKind]]] = {
    # The machine: AUDIT_ARCH, the number of seccomp, and the calls.
    "x86_64": (
        0xC000003E,
        317,
        _by_number(
            (_OPENS, [2]),  # open
            (_OPENS_AT, [257]),  # openat
            (_FOLLOWS, [85, 76, 90, 92]),  # creat, truncate, chmod, chown
            (_FOLLOWS_AT, [437, 268, 452, 260]),  # openat2, fchmodat, fchmodat2, fchownat
            (_NAMES, [83, 84, 87, 133]),  # mkdir, rmdir, unlink, mknod
            (_NAMES_AT, [258, 263, 259]),  # mkdirat, unlinkat, mknodat
            (_MOVES, [82]),  # rename
            (_MOVES_AT, [264, 316]),  # renameat, renameat2
            (_LINKS, [86]),  # link
            (_LINKS_AT, [265]),  # linkat
            (_SYMLINKS, [88]),  # symlink
            (_SYMLINKS_AT, [266]),  # symlinkat
        ),
    ),
    "aarch64": (
        0xC00000B7,
        277,
        _by_number(
            (_OPENS_AT, [56]),
            (_FOLLOWS, [45]),
            (_FOLLOWS_AT, [437, 53, 452, 54]),
            (_NAMES_AT, [34, 35, 33]),
            (_MOVES_AT, [38, 276]),
            (_LINKS_AT, [37]),
            (_SYMLINKS_AT, [36]),
        ),
    ),
}


@dataclass(frozen=True)
class FileCall:
    """A system call that waits for an answer."""

    id: int
    thread: int
    """The id of the thread that makes it."""
    kind: _CallKind
    arguments: Sequence[int]

    @property
    def moves(self) -> bool:
        """Whether it renames the first of its paths to the second."""
        return self.kind.moves

    def paths(self) -> list[str]:
        """The absolute paths, with links followed as the call does. Raises OSError."""
        named = [
            self._path(None if fd is None else self.arguments[fd], self.arguments[at])
            for fd, at in self.kind.paths
        ]
        return [path for path in named if path]

    def _path(self, fd: int | None, address: int) -> str:
        text = self._read_text(address)
        if not text:  # the descriptor's own file
            return ""
        me = f"/proc/{self.thread}"
        for own in ("/proc/self/", "/proc/thread-self/", "/dev/fd/"):
            if text.startswith(own):
                text = f"{me}/{'fd/' if own == '/dev/fd/' else ''}{text[len(own) :]}"
        number = _AT_FDCWD if fd is None else ctypes.c_int32(fd & 0xFFFFFFFF).value
        folder = os.readlink(f"{me}/cwd" if number == _AT_FDCWD else f"{me}/fd/{number}")
        path = os.path.join(folder, text)
        if self.kind.follows:
            return os.path.realpath(path)
        parent, name = os.path.split(path.rstrip("/"))
        return os.path.join(os.path.realpath(parent), name)

    def _read_text(self, address: int) -> str:
        """The text at an address of the thread's memory, up to its end. Raises ProcessLookupError
        if its process has ended."""
        text = b""
        with open(f"/proc/{self.thread}/mem", "rb", buffering=0) as memory:
            while b"\0" not in text and len(text) < _PATH_MAX:
                at = address + len(text)
                memory.seek(at)
                if not (found := memory.read(_PATH_MAX - at % _PATH_MAX)):  # to the page's end
                    raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
                text += found
        return os.fsdecode(text.partition(b"\0")[0])


def receive(listener: int) -> FileCall | None:
    """The next call; None if it has been given up, as where its process has ended."""
    message = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, message)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINTR):
            raise
        return None
    number, thread, _, call, _, _, *arguments = _NOTIFICATION.unpack(message)
    return FileCall(number, thread, _CALLS[platform.machine()][2][call], arguments)


def send_response(listener: int, call: FileCall, error: int) -> None:
    """Let the kernel make the call, or let it fail with this `error` number if that is not 0."""
    flags = 0 if error else _CONTINUE
    try:
        fcntl.ioctl(listener, _SEND, _RESPONSE.pack(call.id, 0, -error, flags))
    except OSError as gone:
        if gone.errno != errno.ENOENT:
            raise


def install_filter() -> int:
    """Let this process, and what it starts, wait in these calls, and adopt what its children leave.

    Returns the descriptor with which another process is to receive and answer the calls. Raises
    OSError if the kernel refuses, or if this is another machine than x86_64 or aarch64.
    """
    if platform.machine() not in _CALLS:
        raise OSError(errno.ENOSYS, f"not on a machine of the kind {platform.machine()}")
    arch, seccomp, calls = _CALLS[platform.machine()]
    code = b"".join(struct.pack("=HBBI", *each) for each in _program(arch, calls))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    library = ctypes.CDLL(None, use_errno=True)
    for option in (_NO_NEW_PRIVS, _CHILD_SUBREAPER):
        library.prctl(option, 1, 0, 0, 0)
    listener: int = library.syscall(seccomp, _SET_MODE_FILTER, _NEW_LISTENER, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return listener


def _program(arch: int, calls: dict[int, _CallKind]) -> list[tuple[int, int, int, int]]:
    """The filter in the kernel's BPF: (operation, jump if true, jump if false, constant)."""
    load, equal, any_bit, leave = 0x20, 0x15, 0x45, 0x06
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), (leave, 0, 0, _ALLOW), (load, 0, 0, 0)]
    for number, kind in calls.items():
        if kind.flags is None:
            code += [(equal, 0, 1, number), (leave, 0, 0, _NOTIFY)]
        else:
            code += [
                (equal, 0, 4, number),
                (load, 0, 0, 16 + 8 * kind.flags),
                (any_bit, 1, 0, WRITE_FLAGS),
                (leave, 0, 0, _ALLOW),
                (leave, 0, 0, _NOTIFY),
            ]
    return [*code, (leave, 0, 0, _ALLOW)]
