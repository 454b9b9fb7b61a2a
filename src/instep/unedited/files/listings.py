"""What answers for os.listdir and os.scandir: names in the same order on all ranks."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from instep.unedited.files.os_functions import answering, named
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files

Function = Callable[..., Any]


def listdir(original: Function, path: Any = ".") -> Any:
    """For os.listdir."""
    role = answering()
    with named(path):
        folder = _folder(path, role)
        names = role.listed(folder) if isinstance(role, OverlayFiles) else None
    if names is not None:
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names
    names = original(path)
    return sorted(names) if isinstance(role, Rank0Files) and role.has_changed(folder) else names


def _folder(path: Any, role: Rank0Files | OverlayFiles | None) -> Any:
    """The path of what os.listdir and os.scandir are given, which may be a descriptor."""
    if path is None:
        return "."
    return role.open_folders.path_of(path) if role and isinstance(path, int) else path


class Entry(os.PathLike[str]):
    """What os.DirEntry is, for a folder that is not there as it is seen."""

    def __init__(self, folder: str, name: str, *, by_descriptor: bool = False) -> None:
        self.name = name
        self._place = os.path.join(folder, name)
        self.path = name if by_descriptor else self._place

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As os.DirEntry has it."""
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As os.DirEntry has it."""
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        """As os.DirEntry has it."""
        return os.path.islink(self._place)

    def _mode(self, follow_symlinks: bool) -> int:
        try:
            return os.stat(self._place, follow_symlinks=follow_symlinks).st_mode
        except FileNotFoundError:
            return 0

    def is_junction(self) -> bool:
        """As os.DirEntry has it."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As os.DirEntry has it."""
        return os.stat(self._place, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """As os.DirEntry has it."""
        return os.lstat(self._place).st_ino


class _Entries:
    """What os.scandir returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""


def scandir(original: Function, path: Any = ".") -> Any:
    """For os.scandir."""
    role = answering()
    if role is None or isinstance(path, bytes):
        return original(path)
    with named(path):
        folder = _folder(path, role)
        names = role.listed(folder) if isinstance(role, OverlayFiles) else None
    if names is not None:
        at, fd = os.fspath(folder), isinstance(path, int)
        return _Entries([Entry(at, name, by_descriptor=fd) for name in names])
    if isinstance(role, OverlayFiles) or not role.has_changed(folder):
        return original(path)
    with original(path) as entries:
        return _Entries(sorted(entries, key=lambda entry: str(entry.name)))
