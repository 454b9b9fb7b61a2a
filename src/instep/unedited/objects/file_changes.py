"""The files that a forward reads, as the script changes them between its calls."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from zlib import crc32

_MAX_FILES = 16
_MAX_READ = 1 << 16
"""Of larger files the size and the time of the last change are looked at, in bytes."""


class FileChanges:
    """Some files, as they were when they were last looked at."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, ...]] = {}

    def watch(self, paths: Iterable[str]) -> None:
        """Look at these from now on, too."""
        for path in paths:
            if path not in self._seen and len(self._seen) < _MAX_FILES:
                self._seen[path] = _look_at(path)

    def has_changed(self) -> bool:
        """Whether one of them is not as it was when this was last asked."""
        if not self._seen:
            return False
        before, self._seen = self._seen, {path: _look_at(path) for path in self._seen}
        return before != self._seen


def _look_at(path: str) -> tuple[int, ...]:
    """What tells another content, as the script would read it; nothing of what is no file."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return ()
        if status.st_size > _MAX_READ:
            return status.st_size, status.st_mtime_ns
        with open(path, "rb") as file:
            return status.st_size, crc32(file.read())
    except OSError:
        return ()
