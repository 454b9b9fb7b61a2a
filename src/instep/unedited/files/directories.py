"""The replacements of os.listdir and os.scandir: the same names in the same order on all ranks."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from instep.process.patching import Function
from instep.unedited.files.os_functions import PASSTHROUGH, files_for
from instep.unedited.files.paths import PassthroughFiles, script_paths_in_errors


def listdir(original: Function, path: Any = ".") -> Any:
    """For os.listdir."""
    files = files_for()
    if files is PASSTHROUGH:
        return original(path)
    with script_paths_in_errors(path):
        directory = _directory(path, files)
        names, found = _list_once(files, directory, lambda: original(path))
    if names is not None:
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names
    return sorted(found) if files.has_changed(directory) else found


def _directory(path: Any, files: PassthroughFiles) -> Any:
    """The path of the directory, which the script may name by a descriptor."""
    if path is None:
        return "."
    return files.open_directories.path_of(path) if isinstance(path, int) else path


def _list_once(
    files: PassthroughFiles, directory: Any, list_real: Callable[[], list[Any]]
) -> tuple[list[str] | None, list[Any]]:
    """The names in a directory, or None and what is in the real one, if this job has not changed
    it: looked up again afterwards, because rank 0 may have begun to change it meanwhile."""
    names, found = files.listdir(directory), []
    if names is None:
        try:
            found = list_real()
        except OSError:
            names = files.listdir(directory)
            if names is None:
                raise
        else:
            names = files.listdir(directory)
    return names, found


class DirEntry(os.PathLike[Any]):
    """Takes the place of os.DirEntry if the real directory is not the one that the rank sees."""

    def __init__(self, directory: Any, name: Any, *, by_descriptor: bool) -> None:
        self.name = name
        self._path = os.path.join(directory, name)
        self.path = name if by_descriptor else self._path

    def __fspath__(self) -> Any:
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


class _ScandirIterator(Iterator[Any], AbstractContextManager[Any]):
    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: no descriptor is open."""


def scandir(original: Function, path: Any = ".") -> Any:
    """For os.scandir."""
    files = files_for()
    if files is PASSTHROUGH:
        return original(path)
    with script_paths_in_errors(path):
        directory = _directory(path, files)
        if files.layers:
            names, entries = _list_once(files, directory, lambda: _read_entries(original, path))
            at, by_descriptor = os.fspath(directory), isinstance(path, int)
            text = os.fsencode if isinstance(at, bytes) else str
            if names is not None:
                entries = [DirEntry(at, text(n), by_descriptor=by_descriptor) for n in names]
            return _ScandirIterator(entries)
    if not files.has_changed(directory):
        return original(path)
    return _ScandirIterator(
        sorted(_read_entries(original, path), key=lambda entry: os.fsdecode(entry.name))
    )


def _read_entries(original: Function, path: Any) -> list[Any]:
    with original(path) as entries:
        return list(entries)
