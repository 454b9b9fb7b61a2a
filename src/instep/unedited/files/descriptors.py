"""Which folder a file descriptor is open for, as the script sees it: `dir_fd=`, os.listdir(fd)."""

from __future__ import annotations

import errno
import os
import stat

from instep.unedited.files.bypass import bypass_overlay


class OpenFolders:
    """The folders that this rank has open, and where each of them is by now.

    On rank 0 the kernel knows that. Another rank may have moved or removed a folder in its own
    layer only, and rank 0 may have moved it already: so it keeps an account of its own.
    """

    def __init__(self) -> None:
        self._paths: dict[int, tuple[tuple[int, int], str | None]] = {}

    def opened(self, fd: int, path: str) -> None:
        """This descriptor has been opened for the folder `path`, which is absolute."""
        seen = os.fstat(fd)
        self._paths[fd] = (seen.st_dev, seen.st_ino), path

    def moved(self, old: str, new: str | None) -> None:
        """What was at `old` is at `new` from now on; None: it is nowhere."""
        for fd, (identity, path) in list(self._paths.items()):
            if path is not None and f"{path}/".startswith(f"{old}/"):
                self._paths[fd] = identity, None if new is None else new + path[len(old) :]

    def path_of(self, fd: int) -> str:
        """Where the folder is. Raises what a call with `dir_fd=fd` would."""
        seen = os.fstat(fd)
        if not stat.S_ISDIR(seen.st_mode):
            raise _error(errno.ENOTDIR)
        identity, path = self._paths.get(fd, (None, None))
        if identity != (seen.st_dev, seen.st_ino):
            path = _real_path(fd, seen)
        if path is None:
            raise _error(errno.ENOENT)
        return path


def _real_path(fd: int, seen: os.stat_result) -> str | None:
    """By the kernel's account; None if the folder has been removed or cannot be reached."""
    with bypass_overlay():
        path = os.readlink(f"/proc/self/fd/{fd}")
        try:
            return path if os.path.samestat(os.stat(path), seen) else None
        except OSError:
            return None


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
