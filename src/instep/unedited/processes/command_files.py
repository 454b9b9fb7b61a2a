"""The files after a command: every rank goes on from what rank 0's files are at that moment.

instep does not see which files a command changes that rank 0 runs for all ranks. But when it has
ended, all ranks are at the same point of the script, and rank 0's files are what one process would
see. So rank 0 starts a new generation of what it keeps, and every other rank empties its layer. A
rank keeps in its layer what it alone has: files that are open, paths that rank 0 has never touched
(their names may contain a time), and temporary files, which get the content of rank 0's.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from instep.unedited.errors import UneditedError
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.layers.generations import (
    Generations,
    before_layer,
    delete_files,
    generations_in_use,
)
from instep.unedited.files.layers.layer import Layer, is_directory, remove_tree
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files

Stamp = tuple[int, ...]
_DELETED = " (deleted)"


@dataclass(frozen=True)
class FileState:
    """What rank 0 sends about its files when a command has ended."""

    generation: int
    """The number of the new generation; -1 if there is none."""
    open: dict[str, bool]
    """The paths of the files that it has open, and whether the command may have changed them."""
    handles: list[tuple[int, bytes | None] | None]
    """For each file that the script gave to the command: the offset, and the content if other
    ranks cannot reach the file. None: it is closed by now, or no regular file."""
    temporary: list[str]
    """The temporary files that the command names."""


class GenerationChange:
    """Starts a new generation of this rank's layers after a command.

    `shared` is the directory of rank 0's host; None if this rank runs on another host.
    """

    def __init__(
        self,
        files: Rank0Files | OverlayFiles,
        shared: str | None,
        generations: Generations | None,
    ) -> None:
        self.files = files
        self._shared = shared
        self._generations = generations
        self._number = 0
        self._oldest = 0
        """On rank 0, of the generations whose files are not deleted."""

    @property
    def is_on_rank0_host(self) -> bool:
        """Whether this rank sees the files of rank 0's host."""
        return self._shared is not None

    def start_on_rank0(self) -> int:
        """Start a generation on rank 0. Returns its number."""
        assert isinstance(self.files, Rank0Files)
        assert self._shared is not None
        shared = self._shared
        oldest = min(generations_in_use(shared), default=self._number)
        for number in range(self._oldest, oldest):
            delete_files(before_layer(shared, number).directory)
        self._oldest = oldest
        self._number += 1
        before = before_layer(shared, self._number)
        self.files.start_generation(before, lambda: self._earlier(shared))
        return self._number

    def _earlier(self, shared: str) -> list[Layer]:
        oldest = min(generations_in_use(shared), default=self._number)
        return [before_layer(shared, number) for number in range(oldest, self._number)]

    def start(self, state: FileState) -> None:
        """Start rank 0's new generation on another rank."""
        assert isinstance(self.files, OverlayFiles)
        if self._generations is None or self._shared is None:
            return  # on another host, whose files may be others
        generations, old = self._generations, self._generations.number
        path = _current_directory(self.files)
        generations.create(state.generation)
        old_layer = generations.rank_layer_of(old)
        new_layer = generations.rank_layer_of(state.generation)
        _Transfer(state, before_layer(self._shared, old), old_layer, new_layer).move()
        generations.start(state.generation)
        delete_files(os.path.dirname(old_layer.directory))
        self.files.start_generation()
        if path is not None:
            with suppress(OSError):  # the command has removed it
                self.files.change_directory(path)


class _Transfer:
    """Moves what stays a rank's own from its old layer to the new one."""

    def __init__(self, state: FileState, before: Layer, old: Layer, new: Layer) -> None:
        self._state, self._before = state, before
        self._old, self._new = old, new
        self._open = {old.visible_path(location) for location in open_files()}

    def move(self, directory: str = "/") -> None:
        """Move the entries of a directory, and those below them."""
        for name in sorted(self._old.names(directory)[0]):
            path = os.path.join(directory, name)
            location = self._old.find(path)
            if location is None:  # a directory that is only the parent of something
                self.move(path)
                continue
            if not location or location == path:  # the file at the path itself is right
                continue
            is_dir = is_directory(location)
            if is_dir and not self._old.is_opaque(path):
                self.move(path)
            elif not self._before.has_entry(path) and not os.path.lexists(path):
                add = self._new.add_directory if is_dir else self._new.add_file
                os.rename(location, add(path))
            elif is_dir:
                self.move(path)
            elif path in self._open and path in self._state.open:
                if self._state.open[path]:
                    _overwrite(location, path)
                os.rename(location, self._new.add_file(path))


def _current_directory(files: OverlayFiles) -> str | None:
    """Where this rank goes on after a command, which may have renamed the real directory."""
    with suppress(FileNotFoundError):
        here = os.getcwd()
        if files.visible_path(here) == here:
            return here
    with suppress(FileNotFoundError):
        return files.current_directory()
    return None


# ----------------------------------------------------------------------------------- a command


class CommandFiles:
    """The files of a command: a FileSync of the relay at the command's end."""

    def __init__(
        self, change: GenerationChange, text: str, handles: Iterable[int], *, new_generation: bool
    ) -> None:
        self._change = change
        self._new_generation = new_generation
        self._handles = [(fd, file_identity(fd, only_regular=True)) for fd in handles]
        self.temporary = change.files.temporary_in(text)
        """The temporary files of this rank that the command names."""
        self._temporary0: list[str] = []
        self._open = self._stamps()

    @bypass_overlay()
    def capture(self) -> FileState:
        """On rank 0, while all ranks wait."""
        before = self._open
        self._open = self._stamps()
        return FileState(
            self._change.start_on_rank0() if self._new_generation else -1,
            {path: before.get(path) != stamp for path, stamp in self._open.items()},
            [self._handle(fd, identity) for fd, identity in self._handles],
            self.temporary,
        )

    @bypass_overlay()
    def apply(self, state: FileState) -> None:
        """On another rank, while rank 0 waits."""
        self._temporary0 = state.temporary
        if state.temporary and not self._change.is_on_rank0_host:
            raise UneditedError(
                f"a command has worked on the temporary file {state.temporary[0]} of rank 0's "
                "host, which this rank's host does not see. Let it work in the script's own "
                "directory, or run this script on one host, or with --plain."
            )
        for source, target in zip(state.temporary, self.temporary, strict=True):
            _mirror(source, target)
        if state.generation >= 0:
            self._change.start(state)
        for (fd, identity), handle in zip(self._handles, state.handles, strict=True):
            if handle is not None and file_identity(fd) == identity:
                _set_handle(fd, *handle)

    def with_own_names(self, value: Any) -> Any:
        """Text or bytes in which rank 0's temporary files have the names of this rank's."""
        for name0, name in zip(self._temporary0, self.temporary, strict=False):
            if isinstance(value, str):
                value = value.replace(name0, name)
            if isinstance(value, bytes):
                value = value.replace(os.fsencode(name0), os.fsencode(name))
        return value

    @bypass_overlay()
    def _stamps(self) -> dict[str, Stamp]:
        is_rank0 = isinstance(self._change.files, Rank0Files)
        return stamps() if is_rank0 and self._new_generation else {}

    @bypass_overlay()
    def _handle(self, fd: int, identity: Stamp | None) -> tuple[int, bytes | None] | None:
        if identity is None or file_identity(fd) != identity:
            return None
        path = os.readlink(f"/proc/self/fd/{fd}")
        content = None
        if path.endswith(_DELETED) or self._change.files.is_private(path):
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                content = file.read()
        return os.lseek(fd, 0, os.SEEK_CUR), content


def file_identity(fd: int, *, only_regular: bool = False) -> Stamp | None:
    """Device and inode of an open file; None if it is closed, or not regular but has to be."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    if only_regular and not stat.S_ISREG(status.st_mode):
        return None
    return status.st_dev, status.st_ino


def _set_handle(fd: int, offset: int, content: bytes | None) -> None:
    if content is not None:
        with open(f"/proc/self/fd/{fd}", "r+b") as file:
            file.write(content)
            file.truncate()
    os.lseek(fd, offset, os.SEEK_SET)


# ------------------------------------------------------------------------------- open files


def open_files() -> Iterator[str]:
    """The locations of the files that this process has open or mapped."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{fd}")
    with open("/proc/self/maps") as maps:
        for line in maps:
            _, access, _, _, inode, *path = line.split(None, 5)
            if access[3] == "s" and inode != "0" and path:
                yield path[0].rstrip("\n")


def stamps() -> dict[str, Stamp]:
    """Inode, size and time of the regular files that this process has open, by path."""
    found: dict[str, Stamp] = {}
    for path in open_files():
        if path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/")):
            with suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    found[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


# ----------------------------------------------------------------------------------- copying


def _overwrite(target: str, source: str) -> None:
    """Give the target, which is open, the content of the source."""
    with open(source, "rb") as reading, open(target, "r+b") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
        writing.truncate()


def _mirror(source: str, target: str) -> None:
    """Make a temporary file or directory equal to rank 0's."""
    if os.path.isdir(source):
        _mirror_directory(source, target)
    elif not os.path.lexists(source):
        remove_tree(target)
    elif os.path.isfile(target):
        _overwrite(target, source)
    else:
        shutil.copy2(source, target)


def _mirror_directory(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    names = set(os.listdir(source))
    for name in set(os.listdir(target)) - names:
        remove_tree(os.path.join(target, name))
    for name in names:
        one, other = os.path.join(source, name), os.path.join(target, name)
        if _file_type(one) != _file_type(other):
            remove_tree(other)
        if is_directory(one):
            _mirror_directory(one, other)
        elif os.path.islink(one):
            remove_tree(other)
            os.symlink(os.readlink(one), other)
        elif os.path.isfile(one):
            _copy_if_changed(one, other)


def _copy_if_changed(source: str, target: str) -> None:
    if os.path.lexists(target):
        one, other = os.stat(source), os.stat(target)
        if (one.st_size, one.st_mtime_ns) != (other.st_size, other.st_mtime_ns):
            _overwrite(target, source)
            shutil.copystat(source, target)
    else:
        shutil.copy2(source, target)


def _file_type(path: str) -> int | None:
    with suppress(FileNotFoundError):
        return stat.S_IFMT(os.lstat(path).st_mode)
    return None
