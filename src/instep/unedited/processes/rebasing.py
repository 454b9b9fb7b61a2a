"""The files after a command: every rank goes on from what rank 0's files are at that moment.

A command that rank 0 has run for all has changed files unseen. But when its end is told all ranks
are at the same point of the script, and rank 0's files are what one process would see. So rank 0
opens a new generation of what it keeps, and another rank empties its own layer. It retains what
only this rank has: files that are open, paths that rank 0 has never touched (there may be a time
in a name), and temporary files, which get the content of rank 0's.
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
from instep.unedited.files.generations import Generations, before_of, emptied, in_use
from instep.unedited.files.layers import Layer
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.paths import on_real_files
from instep.unedited.files.rank0_files import Rank0Files

Stamp = tuple[int, ...]
_DELETED = " (deleted)"


@dataclass(frozen=True)
class Told:
    """What rank 0 says of its files when a command has ended."""

    generation: int
    open: dict[str, bool]
    """The files that it has open, by path, and whether the command may have changed them."""
    handles: list[tuple[int, bytes | None] | None]
    """Of each file that the script has given to the command: where it stands now, and what is
    in it, if other ranks cannot reach it. None: it is closed by now, or no file."""
    temporary: list[str]
    """The temporary files that the command names."""


class Rebasing:
    """This rank's part in it, from command to command."""

    def __init__(
        self, role: Rank0Files | OverlayFiles, shared: str | None, layers: Generations | None
    ):
        self.role = role
        self._shared = shared
        self._layers = layers
        self._generation = 0

    @property
    def sees_rank_0(self) -> bool:
        """Whether this is rank 0's host."""
        return self._shared is not None

    # ------------------------------------------------------------------------------- rank 0

    def opened(self) -> int:
        """Begin a generation. Returns its number."""
        assert isinstance(self.role, Rank0Files)
        assert self._shared is not None
        shared, current = self._shared, self._generation
        used = in_use(shared)
        for number in range(min(used, default=current)):
            emptied(before_of(shared, number).folder)
        self._generation += 1
        self.role.rebase(before_of(shared, self._generation), lambda: self._earlier(shared))
        return self._generation

    def _earlier(self, shared: str) -> list[Layer]:
        oldest = min(in_use(shared), default=self._generation)
        return [before_of(shared, number) for number in range(oldest, self._generation)]

    # ------------------------------------------------------------------------ the other ranks

    def enter(self, told: Told) -> None:
        """Go on from what rank 0's files are, in its new generation."""
        assert isinstance(self.role, OverlayFiles)
        if self._layers is None or not self.sees_rank_0:
            return  # on another host, whose disk may be another one
        layers, old = self._layers, self._layers.number
        here = _current_folder()
        place = here and self.role.virtual(here)
        layers.make(told.generation)
        before = before_of(self._shared or "", old)
        _Retained(told, before, layers.own_of(old), layers.own_of(told.generation)).take()
        layers.begin(told.generation)
        emptied(os.path.dirname(layers.own_of(old).folder))
        self.role.forget()
        if place and place != here:
            with suppress(OSError):  # the command has removed it
                os.chdir(self.role.folder(place))


class _Retained:
    """What a rank has in its layer that stays its own in the next generation."""

    def __init__(self, told: Told, before: Layer, old: Layer, new: Layer) -> None:
        self._told, self._before = told, before
        self._old, self._new = old, new
        self._open = {old.virtual(place) for place in open_places()}

    def take(self, folder: str = "/") -> None:
        """Move it from the old layer to the new one."""
        for name in sorted(self._old.names(folder)[0]):
            plain = os.path.join(folder, name)
            place = self._old.find(plain)
            if place is None:  # a folder on the way to something
                self.take(plain)
                continue
            if not place or place == plain:  # what is released lies where it lies
                continue
            is_folder = os.path.isdir(place) and not os.path.islink(place)
            if is_folder and not self._old.is_new(plain):
                self.take(plain)
            elif not self._before.knows(plain) and not os.path.lexists(plain):
                make_room = self._new.room_for_folder if is_folder else self._new.room_for
                os.rename(place, make_room(plain))
            elif is_folder:
                self.take(plain)
            elif plain in self._open and plain in self._told.open:
                if self._told.open[plain]:
                    _overwrite(place, plain)
                os.rename(place, self._new.room_for(plain))


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


# ----------------------------------------------------------------------------------- a command


class Command:
    """What a command has to do with the script's files: a moment of the relay's, at its end."""

    def __init__(
        self, rebasing: Rebasing, text: str, handles: Iterable[int], *, rebases: bool
    ) -> None:
        self._rebasing = rebasing
        self._rebases = rebases
        self._handles = [(fd, _identity(fd)) for fd in handles]
        self.temporary = rebasing.role.temporary_in(text)
        """The temporary files that it names, of this rank's."""
        self._theirs: list[str] = []
        self._open = self._stamps()

    @on_real_files
    def opened(self) -> Told:
        """On rank 0, when all ranks wait."""
        before = self._open
        self._open = self._stamps()
        return Told(
            self._rebasing.opened() if self._rebases else -1,
            {path: before.get(path) != stamp for path, stamp in self._open.items()},
            [self._handle(fd, identity) for fd, identity in self._handles],
            self.temporary,
        )

    @on_real_files
    def enter(self, told: Told) -> None:
        """On another rank, while rank 0 waits."""
        self._theirs = told.temporary
        if told.temporary and not self._rebasing.sees_rank_0:
            raise UneditedError.temporary_elsewhere(told.temporary[0])
        for theirs, mine in zip(told.temporary, self.temporary, strict=True):
            _mirror(theirs, mine)
        if told.generation >= 0:
            self._rebasing.enter(told)
        for (fd, identity), seen in zip(self._handles, told.handles, strict=True):
            if seen is not None and _identity(fd) == identity:
                _set_handle(fd, *seen)

    def as_seen_here(self, value: Any) -> Any:
        """Text or bytes in which rank 0's temporary files have the names of this rank's."""
        for theirs, mine in zip(self._theirs, self.temporary, strict=False):
            if isinstance(value, str):
                value = value.replace(theirs, mine)
            if isinstance(value, bytes):
                value = value.replace(os.fsencode(theirs), os.fsencode(mine))
        return value

    @on_real_files
    def _stamps(self) -> dict[str, Stamp]:
        role = self._rebasing.role
        return stamps() if isinstance(role, Rank0Files) and self._rebases else {}

    @on_real_files
    def _handle(self, fd: int, identity: Stamp | None) -> tuple[int, bytes | None] | None:
        seen = _identity(fd)
        if seen is None or seen != identity:
            return None
        path = os.readlink(f"/proc/self/fd/{fd}")
        content = None
        if path.endswith(_DELETED) or self._rebasing.role.is_spared(path):
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                content = file.read()
        return os.lseek(fd, 0, os.SEEK_CUR), content


def _identity(fd: int) -> Stamp | None:
    """Which regular file this is; None if it is none."""
    try:
        seen = os.fstat(fd)
    except OSError:
        return None
    return (seen.st_dev, seen.st_ino) if stat.S_ISREG(seen.st_mode) else None


def _set_handle(fd: int, offset: int, content: bytes | None) -> None:
    if content is not None:
        with open(f"/proc/self/fd/{fd}", "r+b") as file:
            file.write(content)
            file.truncate()
    os.lseek(fd, offset, os.SEEK_SET)


# ------------------------------------------------------------------------------- what is open


def open_places() -> Iterator[str]:
    """Where the files lie that this process has open, or in its memory."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{fd}")
    with open("/proc/self/maps") as maps:
        for line in maps:
            _, access, _, _, number, *path = line.split(None, 5)
            if access[3] == "s" and number != "0" and path:
                yield path[0].rstrip("\n")


def stamps() -> dict[str, Stamp]:
    """The regular files that this process has open, by path, as they are now."""
    found: dict[str, Stamp] = {}
    for place in open_places():
        if place.startswith("/") and not place.startswith(("/dev/", "/proc/", "/sys/")):
            with suppress(OSError):
                seen = os.lstat(place)
                if stat.S_ISREG(seen.st_mode):
                    found[place] = (seen.st_ino, seen.st_size, seen.st_mtime_ns)
    return found


# ----------------------------------------------------------------------------------- copying


def _overwrite(place: str, source: str) -> None:
    """Give the file at `place`, which is open, the content of another one."""
    with open(source, "rb") as reading, open(place, "r+b") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
        writing.truncate()


def _mirror(source: str, target: str) -> None:
    """Make a temporary file or folder what rank 0's is."""
    if os.path.isdir(source):
        _mirror_folder(source, target)
    elif not os.path.lexists(source):
        _remove(target)
    elif os.path.isfile(target):
        _overwrite(target, source)
    else:
        shutil.copy2(source, target)


def _mirror_folder(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    names = set(os.listdir(source))
    for name in set(os.listdir(target)) - names:
        _remove(os.path.join(target, name))
    for name in names:
        theirs, mine = os.path.join(source, name), os.path.join(target, name)
        if _kind(theirs) != _kind(mine):
            _remove(mine)
        if os.path.isdir(theirs) and not os.path.islink(theirs):
            _mirror_folder(theirs, mine)
        elif os.path.islink(theirs):
            _remove(mine)
            os.symlink(os.readlink(theirs), mine)
        elif os.path.isfile(theirs):
            _copy_if_changed(theirs, mine)


def _copy_if_changed(source: str, target: str) -> None:
    if os.path.lexists(target):
        theirs, mine = os.stat(source), os.stat(target)
        if (theirs.st_size, theirs.st_mtime_ns) != (mine.st_size, mine.st_mtime_ns):
            _overwrite(target, source)
            shutil.copystat(source, target)
    else:
        shutil.copy2(source, target)


def _kind(path: str) -> int | None:
    with suppress(FileNotFoundError):
        return stat.S_IFMT(os.lstat(path).st_mode)
    return None


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
