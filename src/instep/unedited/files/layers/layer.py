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
import site
import stat
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import PurePath

MISSING = ""
"""The location of a path that a layer says does not exist."""

_DIRECTORY, _WHITEOUT, _OPAQUE, _RELEASED, _COPIED, _METADATA_ONLY = "d", "w", "o", "r", "c", "m"
"""First letters of the names below `marks`. _DIRECTORY: a directory that holds marks. _RELEASED:
the file at the path itself is the right one. _COPIED: this layer has the directory's own metadata;
without this mark or _OPAQUE it only has the directory as the parent of something."""


real_lstat = os.lstat
"""As it is before it is replaced: each import looks for hundreds of files."""


_real_access = os.access


def _lexists(path: str) -> bool:
    try:
        real_lstat(path)
    except (OSError, ValueError):
        return False
    return True


@cache
def _find_installations() -> tuple[str, ...]:
    """The directories of Python's and the system's libraries, each with a slash at its end.

    An import looks into thousands of files there, and hardly a job changes any of them.
    """
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), "/usr/lib", "/usr/share"}
    paths |= {path for path in sys.path if path.endswith(("/site-packages", "/dist-packages"))}
    found = sorted({f"{os.path.realpath(path)}/" for path in paths})
    outermost = [path for path in found if not path.startswith(tuple({*found} - {path}))]
    return tuple(path for path in outermost if len(path) < 200)  # a file's name has at most 255


class Layer:
    """The changes below one directory, which is made at the first change.

    `alias_pattern` matches the directory's names if it has several. The layer has a file for each
    of the `installations` in or above which something has changed, so one look is enough to see
    that nothing has.
    """

    def __init__(
        self,
        directory: str,
        alias_pattern: str | None = None,
        installations: tuple[str, ...] | None = None,
    ) -> None:
        self.directory = directory
        self.installations = _find_installations() if installations is None else installations
        self._flags = {root: "/changed-" + root.replace("/", "|") for root in self.installations}
        self._flags_above = {
            str(directory): flag
            for root, flag in self._flags.items()
            for directory in (PurePath(root), *PurePath(root).parents)
        }
        """For the directories that lead to installations: realpath looks at each of them."""
        self._location = re.compile(rf"(?:{alias_pattern or re.escape(directory)})/files(?=/|$)")
        self._files = os.path.join(directory, "files")
        self._marks = os.path.join(directory, "marks")

    def find(self, path: str) -> str | None:
        """The location of `path`; MISSING if it does not exist; None if this layer has no entry."""
        if self._is_unchanged(path):
            return None
        location = self._files + path
        try:
            status = real_lstat(location)
        except NotADirectoryError:
            return MISSING
        except FileNotFoundError:
            return self._find_by_marks(path)
        if stat.S_ISDIR(status.st_mode) and not (
            self._has_directory(path) or self._find_by_marks(path) == MISSING
        ):
            return None  # made as a parent only: its mode is not that of the real directory
        return location

    def change_flag(self, path: str) -> str | None:
        """The name of the file that says if anything has changed in, or above, the installation
        in which `path` is, or above which it is; None if it is neither.

        Above it, that says nothing of what else is in the directory `path`.
        """
        flag = self._flags_above.get(path)
        if flag is None and path.startswith(self.installations):
            flag = next(flag for root, flag in self._flags.items() if path.startswith(root))
        return flag

    def has_flag(self, flag: str) -> bool:
        """Whether there is this file of those that `change_flag` names."""
        return _real_access(self.directory + flag, os.F_OK)

    def _is_unchanged(self, path: str) -> bool:
        flag = self.change_flag(path)
        return flag is not None and not self.has_flag(flag)

    def _note_change(self, path: str) -> None:
        """To be called before anything changes at `path`."""
        below = f"{path.rstrip('/')}/"
        for root, flag in self._flags.items():
            if (below.startswith(root) or root.startswith(below)) and not self.has_flag(flag):
                os.makedirs(self.directory, exist_ok=True)
                with open(self.directory + flag, "w"):
                    pass

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
        """Return the location where `path` is to be written; its parents are made.

        A whiteout stays: until the file is there, lower layers must not show through.
        """
        self._note_change(path)
        location = self._files + path
        os.makedirs(os.path.dirname(location), exist_ok=True)
        self._unset(path, _RELEASED, _METADATA_ONLY)
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
        size, location = real_lstat(path).st_size, self.add_file(path)
        self._set(path, _METADATA_ONLY)
        with open(location, "wb") as file:
            file.truncate(size)
        shutil.copystat(path, location)

    def remove(self, path: str) -> None:
        """Remove `path` and everything below it from this layer, and set a whiteout."""
        self._note_change(path)
        remove_tree(self._files + path)
        self._unset(path, _OPAQUE, _RELEASED, _COPIED, _METADATA_ONLY)
        self._set(path, _WHITEOUT)

    def release(self, path: str) -> None:
        """Remove this layer's file: the one at `path` itself is right by now."""
        self._note_change(path)
        self._set(path, _RELEASED)
        os.unlink(self._files + path)

    def names(self, directory: str) -> tuple[set[str], set[str]]:
        """The names that this layer has in a directory, and those that it hides."""
        if directory not in self._flags_above and self._is_unchanged(directory):
            return set(), set()
        marks = _names(self._marks_in(directory))
        released = {name[1:] for name in marks if name[0] == _RELEASED}
        whiteouts = {name[1:] for name in marks if name[0] == _WHITEOUT}
        there = _names(self._files + directory) | released
        return there, whiteouts - there

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


def remove_tree(location: str) -> None:
    """Remove what is there, with everything below it; does nothing if nothing is."""
    if is_directory(location):
        shutil.rmtree(location)
    elif _lexists(location):
        os.unlink(location)


def copy(source: str, target: str) -> None:
    """Copy one file, link or directory with its times and mode; a directory without its entries."""
    mode = real_lstat(source).st_mode
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
        shutil.copystat(source, target)
    elif not clone(source, target):
        shutil.copy2(source, target, follow_symlinks=False)


_FICLONE = 0x40049409


def clone(source: str, target: str) -> bool:
    """Copy a file with its times and mode by sharing its blocks; False if that is not possible."""
    if not stat.S_ISREG(real_lstat(source).st_mode):
        return False
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            fcntl.ioctl(new, _FICLONE, old.fileno())
    except OSError:
        return False
    shutil.copystat(source, target)
    return True
