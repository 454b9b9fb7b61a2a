"""A layer of changes over a file system, kept in a folder: what is there instead, and what is gone.

Layers lie on disk and not in memory, so that whatever process a rank forks or spawns sees them.
Paths are absolute and without symbolic links on the way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress

GONE = ""
"""Where something lies that this layer says is not there."""

_FOLDER, _MARK, _NEW, _RELEASED, _KEPT, _LOST = "d", "m", "o", "r", "k", "l"
"""First headers of names below `marks`: a folder on the way to marks; the mark of what is gone; of
a folder that is new, so that nothing that lies below this layer is in it; of what lies where it
lies without layers; of a folder that is here itself, not only on the way to what is; of a file
whose content was too large to keep: what lies here has its size, mode and times only."""


class Layer:
    """Changes in one folder, which is made when the first one comes.

    `lies_in`: a pattern of the folder's names, where it has others.
    """

    def __init__(self, folder: str, lies_in: str | None = None) -> None:
        self.folder = folder
        self._lies_in = re.compile(rf"(?:{lies_in or re.escape(folder)})/files(?=/|$)")
        self._files = os.path.join(folder, "files")
        self._marks = os.path.join(folder, "marks")

    def find(self, path: str) -> str | None:
        """Where `path` lies in this layer; GONE if it is not there; None if nothing is known."""
        place = self._files + path
        try:
            seen = os.lstat(place)
        except NotADirectoryError:
            return GONE
        except FileNotFoundError:
            if os.path.lexists(self._mark(path, _RELEASED)):
                return path
            return GONE if self._is_closed(path) else None
        if stat.S_ISDIR(seen.st_mode) and not (self._is_here(path) or self._is_closed(path)):
            return None  # only on the way to what is here: its mode is not the folder's
        return place

    def knows(self, path: str) -> bool:
        """Whether this layer has `path` itself, or says that it itself is not there."""
        return os.path.lexists(self._files + path) or os.path.lexists(self._mark(path, _MARK))

    def is_new(self, folder: str) -> bool:
        """Whether the folder was made in this layer, and not only on the way to something."""
        return os.path.lexists(self._mark(folder, _NEW))

    def _is_here(self, folder: str) -> bool:
        return any(os.path.lexists(self._mark(folder, kind)) for kind in (_NEW, _KEPT))

    def has_lost(self, path: str, place: str) -> bool:
        """Whether `place` is where `path` lies in this layer, without its content."""
        return place == self._files + path and os.path.lexists(self._mark(path, _LOST))

    def hides(self, folder: str) -> bool:
        """Whether nothing that lies below this layer is in a folder."""
        return self.is_new(folder) or self.find(folder) == GONE

    def room_for(self, path: str) -> str:
        """Where to write `path` from now on; the folder above is made."""
        place = self._files + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        self._unset(path, _MARK, _RELEASED, _LOST)
        return place

    def room_for_folder(self, path: str) -> str:
        """Where to make the folder `path`, in which nothing is yet."""
        self._set(path, _NEW)
        return self.room_for(path)

    def keep_folder(self, folder: str) -> None:
        """Let a folder be here as it is now, without what is in it."""
        place = self.room_for(folder)
        os.makedirs(place, exist_ok=True)
        self._set(folder, _KEPT)
        shutil.copystat(folder, place)

    def lose(self, path: str) -> None:
        """Let a file be here, without its content."""
        seen, place = os.lstat(path), self.room_for(path)
        self._set(path, _LOST)
        with open(place, "wb") as file:
            file.truncate(seen.st_size)
        shutil.copystat(path, place)

    def remove(self, path: str) -> None:
        """From now on `path`, with all that this layer has below it, is not there."""
        place = self._files + path
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place)
        elif os.path.lexists(place):
            os.unlink(place)
        self._unset(path, _NEW, _RELEASED, _KEPT, _LOST)
        self._set(path, _MARK)

    def release(self, path: str) -> None:
        """Drop the file: from now on the one that lies at `path` itself is right."""
        self._set(path, _RELEASED)
        os.unlink(self._files + path)

    def names(self, folder: str) -> tuple[set[str], set[str]]:
        """What this layer has in a folder, and what it says is gone from there."""
        marks = _names(self._marks_in(folder))
        released = {name[1:] for name in marks if name[0] == _RELEASED}
        gone = {name[1:] for name in marks if name[0] == _MARK}
        return _names(self._files + folder) | released, gone

    def virtual(self, place: str) -> str:
        """The path that lies at `place`; `place` itself where that is not in this layer."""
        found = self._lies_in.match(place)
        return (place[found.end() :] or "/") if found else place

    def _is_closed(self, path: str) -> bool:
        """Whether a mark says that there is no `path`: its own, or that of a folder above."""
        at = self._marks
        *above, last = path.split("/")[1:]
        for name in above:
            if os.path.lexists(f"{at}/{_MARK}{name}") or os.path.lexists(f"{at}/{_NEW}{name}"):
                return True
            at = f"{at}/{_FOLDER}{name}"
            if not os.path.lexists(at):
                return False
        return os.path.lexists(f"{at}/{_MARK}{last}")

    def _set(self, path: str, kind: str) -> None:
        mark = self._mark(path, kind)
        os.makedirs(os.path.dirname(mark), exist_ok=True)
        with open(mark, "w"):
            pass

    def _unset(self, path: str, *kinds: str) -> None:
        for kind in kinds:
            with suppress(FileNotFoundError):
                os.unlink(self._mark(path, kind))

    def _marks_in(self, folder: str) -> str:
        return self._marks + folder.rstrip("/").replace("/", f"/{_FOLDER}")

    def _mark(self, path: str, kind: str) -> str:
        folder, name = os.path.split(path)
        return f"{self._marks_in(folder)}/{kind}{name}"


def _names(folder: str) -> set[str]:
    try:
        return set() if os.path.islink(folder) else set(os.listdir(folder))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # links in a circle
            raise
        return set()


def copy(source: str, target: str) -> None:
    """Copy one file, link, or empty folder, with its times and mode."""
    mode = os.lstat(source).st_mode
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
        shutil.copystat(source, target)
    elif not clone(source, target):
        shutil.copy2(source, target, follow_symlinks=False)


_FICLONE = 0x40049409


def clone(source: str, target: str) -> bool:
    """Copy a file, with its times and mode, by sharing its blocks; False where that cannot be."""
    if not stat.S_ISREG(os.lstat(source).st_mode):
        return False
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            fcntl.ioctl(new, _FICLONE, old.fileno())
    except OSError:
        return False
    shutil.copystat(source, target)
    return True
