"""A layer of changes over a file system, kept in a folder: what is there instead, and what is gone.

Layers lie on disk and not in memory, so that whatever process a rank forks or spawns sees them.
Paths are absolute and without symbolic links on the way.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress

GONE = ""
"""Where something lies that this layer says is not there."""

_FOLDER, _MARK = "d", "m"
"""First letters of names below `gone`: a folder on the way to marks, and a mark."""


class Layer:
    """Changes in one folder, which is made when the first one comes."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._files = os.path.join(folder, "files")
        self._gone = os.path.join(folder, "gone")

    def place(self, path: str) -> str:
        """Where this layer has `path`, if it has it."""
        return self._files + path

    def find(self, path: str) -> str | None:
        """Where `path` lies in this layer; GONE if it is not there; None if nothing is known."""
        place = self.place(path)
        if os.path.lexists(place):
            return place
        return GONE if os.path.lexists(self._mark(path)) else None

    def room_for(self, path: str) -> str:
        """Where to write `path` from now on; the folder above is made."""
        place = self.place(path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with suppress(FileNotFoundError):
            os.unlink(self._mark(path))
        return place

    def remove(self, path: str) -> None:
        """From now on `path`, with all that this layer has below it, is not there."""
        place = self.place(path)
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place)
        elif os.path.lexists(place):
            os.unlink(place)
        mark = self._mark(path)
        os.makedirs(os.path.dirname(mark), exist_ok=True)
        with open(mark, "w"):
            pass

    def names(self, folder: str) -> tuple[set[str], set[str]]:
        """What this layer has in a folder, and what it says is gone from there."""
        return _names(self._files + folder), {
            name[1:] for name in _names(self._mark_folder(folder)) if name[0] == _MARK
        }

    def virtual(self, place: str) -> str:
        """The path that lies at `place`; `place` itself where that is not in this layer."""
        if place == self._files:
            return "/"
        return place.removeprefix(self._files) if place.startswith(f"{self._files}/") else place

    def _mark_folder(self, folder: str) -> str:
        return self._gone + folder.rstrip("/").replace("/", f"/{_FOLDER}")

    def _mark(self, path: str) -> str:
        folder, name = os.path.split(path)
        return f"{self._mark_folder(folder)}/{_MARK}{name}"


def _names(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def copy(source: str, target: str) -> None:
    """Copy one file, link, or empty folder, with its times and mode."""
    mode = os.lstat(source).st_mode
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
        shutil.copystat(source, target)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
