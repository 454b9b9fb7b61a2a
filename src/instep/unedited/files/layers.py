"""A layer of changes over a file system: a directory that holds changed files, and marks.

The terms are those of Linux's overlayfs: a whiteout says that a path does not exist, an opaque
directory hides what lower layers have in it, and a metadata-only copy lacks the file's content.
Layers are kept on disk, so that processes which a rank forks or spawns see them too. Paths are
absolute, and no directory on the way to the last name is a symbolic link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress
from itertools import accumulate

MISSING = ""
"""The location of a path that a layer says does not exist."""

_DIRECTORY, _WHITEOUT, _OPAQUE, _RELEASED, _COPIED, _METADATA_ONLY = "d", "w", "o", "r", "c", "m"
"""First letters of the names below `marks`. _DIRECTORY: a directory that holds marks. _RELEASED:
the file at the path itself is the right one. _COPIED: this layer has the directory's own metadata;
without this mark or _OPAQUE it only has the directory as the parent of something."""


_lstat = os.lstat
"""As it is before it is replaced: each import looks for hundreds of files."""


def _lexists(path: str) -> bool:
    try:
        _lstat(path)
    except (OSError, ValueError):
        return False
    return True


class Layer:
    """The changes below one directory, which is made at the first change.

    `alias_pattern` matches the directory's names if it has several.
    """

    def __init__(self, directory: str, alias_pattern: str | None = None) -> None:
        self.directory = directory
        self._location = re.compile(rf"(?:{alias_pattern or re.escape(directory)})/files(?=/|$)")
        self._files = os.path.join(directory, "files")
        self._marks = os.path.join(directory, "marks")

    def find(self, path: str) -> str | None:
        """The location of `path`; MISSING if it does not exist; None if this layer has no entry."""
        location = self._files + path
        try:
            status = _lstat(location)
        except NotADirectoryError:
            return MISSING
        except FileNotFoundError:
            return self._find_by_marks(path)
        if stat.S_ISDIR(status.st_mode) and not (
            self._has_directory(path) or self._find_by_marks(path) == MISSING
        ):
            return None  # made as a parent only: its mode is not that of the real directory
        return location

    def is_below_link(self, path: str) -> bool:
        """Whether a symbolic link of this layer stands where `path` has a directory."""
        names = path.split("/")[1:-1]
        parents = accumulate(names, lambda parent, name: f"{parent}/{name}", initial=self._files)
        return any(map(os.path.islink, parents))

    def has_entry(self, path: str) -> bool:
        """Whether this layer has `path` itself or a whiteout for it."""
        return _lexists(self._files + path) or _lexists(self._mark(path, _WHITEOUT))

    def is_opaque(self, directory: str) -> bool:
        """Whether the directory was made in this layer, and not only as a parent of something."""
        return _lexists(self._mark(directory, _OPAQUE))

    def _has_directory(self, directory: str) -> bool:
        return any(_lexists(self._mark(directory, mark)) for mark in (_OPAQUE, _COPIED))

    def is_metadata_only(self, path: str, location: str) -> bool:
        """Whether `location` is this layer's entry for `path`, and lacks the file's content."""
        return location == self._files + path and _lexists(self._mark(path, _METADATA_ONLY))

    def masks(self, directory: str) -> bool:
        """Whether this layer hides everything that lower layers have in a directory."""
        return self.is_opaque(directory) or self.find(directory) == MISSING

    def add_file(self, path: str) -> str:
        """Return the location where `path` is to be written; its parents are made."""
        location = self._files + path
        os.makedirs(os.path.dirname(location), exist_ok=True)
        self._unset(path, _WHITEOUT, _RELEASED, _METADATA_ONLY)
        return location

    def add_directory(self, path: str) -> str:
        """Return the location where the new, empty directory `path` is to be made."""
        self._set(path, _OPAQUE)
        return self.add_file(path)

    def copy_directory(self, directory: str) -> None:
        """Copy the metadata of a directory, without its entries."""
        location = self.add_file(directory)
        os.makedirs(location, exist_ok=True)
        self._set(directory, _COPIED)
        shutil.copystat(directory, location)

    def copy_metadata(self, path: str) -> None:
        """Copy the metadata of a file, without its content."""
        size, location = _lstat(path).st_size, self.add_file(path)
        self._set(path, _METADATA_ONLY)
        with open(location, "wb") as file:
            file.truncate(size)
        shutil.copystat(path, location)

    def remove(self, path: str) -> None:
        """Remove `path` and everything below it from this layer, and set a whiteout."""
        location = self._files + path
        if is_directory(location):
            shutil.rmtree(location)
        elif _lexists(location):
            os.unlink(location)
        self._unset(path, _OPAQUE, _RELEASED, _COPIED, _METADATA_ONLY)
        self._set(path, _WHITEOUT)

    def release(self, path: str) -> None:
        """Remove this layer's file: the one at `path` itself is right by now."""
        self._set(path, _RELEASED)
        os.unlink(self._files + path)

    def names(self, directory: str) -> tuple[set[str], set[str]]:
        """The names that this layer has in a directory, and those that it has whiteouts for."""
        marks = _names(self._marks_in(directory))
        released = {name[1:] for name in marks if name[0] == _RELEASED}
        whiteouts = {name[1:] for name in marks if name[0] == _WHITEOUT}
        return _names(self._files + directory) | released, whiteouts

    def visible_path(self, location: str) -> str:
        """The path whose file lies at `location`; `location` itself if it is not in this layer."""
        found = self._location.match(location)
        return (location[found.end() :] or "/") if found else location

    def _find_by_marks(self, path: str) -> str | None:
        """As `find`, of a path of which this layer has no file."""
        at = self._marks
        *parents, last = path.split("/")[1:]
        for name in parents:
            if _lexists(f"{at}/{_WHITEOUT}{name}") or _lexists(f"{at}/{_OPAQUE}{name}"):
                return path if _lexists(self._mark(path, _RELEASED)) else MISSING
            at = f"{at}/{_DIRECTORY}{name}"
            if not _lexists(at):
                return None
        if _lexists(f"{at}/{_RELEASED}{last}"):
            return path
        return MISSING if _lexists(f"{at}/{_WHITEOUT}{last}") else None

    def _set(self, path: str, mark: str) -> None:
        file = self._mark(path, mark)
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "w"):
            pass

    def _unset(self, path: str, *marks: str) -> None:
        for mark in marks:
            with suppress(FileNotFoundError):
                os.unlink(self._mark(path, mark))

    def _marks_in(self, directory: str) -> str:
        return self._marks + directory.rstrip("/").replace("/", f"/{_DIRECTORY}")

    def _mark(self, path: str, mark: str) -> str:
        directory, name = os.path.split(path)
        return f"{self._marks_in(directory)}/{mark}{name}"


def _names(directory: str) -> set[str]:
    try:
        return set() if os.path.islink(directory) else set(os.listdir(directory))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return set()


def is_directory(location: str) -> bool:
    """Whether a directory is there, and not a link to one."""
    return os.path.isdir(location) and not os.path.islink(location)


def copy(source: str, target: str) -> None:
    """Copy one file, link or directory with its times and mode; a directory without its entries."""
    mode = _lstat(source).st_mode
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
        shutil.copystat(source, target)
    elif not clone(source, target):
        shutil.copy2(source, target, follow_symlinks=False)


_FICLONE = 0x40049409


def clone(source: str, target: str) -> bool:
    """Copy a file with its times and mode by sharing its blocks; False if that is not possible."""
    if not stat.S_ISREG(_lstat(source).st_mode):
        return False
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            fcntl.ioctl(new, _FICLONE, old.fileno())
    except OSError:
        return False
    shutil.copystat(source, target)
    return True
