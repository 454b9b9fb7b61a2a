"""The replacements of os.listdir and os.scandir: the same names in the same order on all ranks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any

from instep.process.patching import Function
from instep.unedited.files.os_functions import files_for, script_paths_in_errors
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files


def listdir(original: Function, path: Any = ".") -> Any:
    """For os.listdir."""
    files = files_for()
    with script_paths_in_errors(path):
        directory = _directory(path, files)
        names = files.listdir(directory) if isinstance(files, OverlayFiles) else None
    if names is not None:
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names
    names = original(path)
    return (
        sorted(names) if isinstance(files, Rank0Files) and files.has_changed(directory) else names
    )


def _directory(path: Any, files: Rank0Files | OverlayFiles | None) -> Any:
    """The path of the directory, which the script may name by a descriptor."""
    if path is None:
        return "."
    return files.open_directories.path_of(path) if files and isinstance(path, int) else path


class DirEntry(os.PathLike[str]):
    """Takes the place of os.DirEntry if the real directory is not the one that the rank sees."""

    def __init__(self, directory: str, name: str, *, by_descriptor: bool = False) -> None:
        self.name = name
        self._path = os.path.join(directory, name)
        self.path = name if by_descriptor else self._path

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As in os.DirEntry."""
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As in os.DirEntry."""
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        """As in os.DirEntry."""
        return os.path.islink(self._path)

    def _mode(self, follow_symlinks: bool) -> int:
        try:
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        except FileNotFoundError:
            return 0

    def is_junction(self) -> bool:
        """As in os.DirEntry."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As in os.DirEntry."""
        with script_paths_in_errors(self.path):
            return os.stat(self._path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """As in os.DirEntry."""
        return self.stat(follow_symlinks=False).st_ino


class _ScandirIterator:
    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _ScandirIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: no descriptor is open."""


def scandir(original: Function, path: Any = ".") -> Any:
    """For os.scandir."""
    files = files_for()
    if files is None or isinstance(path, bytes):
        return original(path)
    with script_paths_in_errors(path):
        directory = _directory(path, files)
        names = files.listdir(directory) if isinstance(files, OverlayFiles) else None
    if names is not None:
        at, by_descriptor = os.fspath(directory), isinstance(path, int)
        return _ScandirIterator([DirEntry(at, n, by_descriptor=by_descriptor) for n in names])
    if isinstance(files, OverlayFiles) or not files.has_changed(directory):
        return original(path)
    with original(path) as entries:
        return _ScandirIterator(sorted(entries, key=lambda entry: str(entry.name)))
