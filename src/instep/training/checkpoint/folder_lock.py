"""One job at a time writes to a folder of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import weakref
from pathlib import Path
from time import monotonic, sleep

from instep.training.checkpoint.errors import FolderInUseError

_WAIT_SECONDS = 10.0
"""For a rank that was killed and still has the lock: a job that starts again."""
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """The lock of a folder, until `release` or the end of this process, however it ends.

    A forked child, such as a worker of a loader, does not have it. Raises FolderInUseError and
    OSError.
    """

    def __init__(self, folder: Path, timeout: float = _WAIT_SECONDS) -> None:
        self._file: int | None = None
        self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        until = monotonic() + timeout
        while not _lock(self._file):
            if monotonic() > until:
                holder = os.pread(self._file, 1000, 0).decode(errors="replace").strip()
                self.release()
                raise FolderInUseError(
                    f"another job writes its checkpoints to {folder}: "
                    f"{holder or 'it has left no name'}. Let it end, or use another folder."
                )
            sleep(0.05)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Let another job have it. Does nothing the second time."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if os is not None:  # Python has taken modules apart, and closes the file itself
            self.release()


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return True  # a file system without locks
        raise
    return True


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
