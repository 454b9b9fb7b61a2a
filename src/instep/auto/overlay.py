"""One file system for all ranks to change, each as if it were alone.

Rank 0 changes the files. Before it changes one that the others may still have to read, it keeps
what was there: that is the layer `before`. Every other rank writes into a layer of its own and
reads from the first of: its own layer, `before`, the files. So each rank sees the files as they
were before the job, with its own changes, at its own pace; nobody waits.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from instep.auto.layers import GONE, Layer, copy
from instep.auto.real import real

Method = TypeVar("Method", bound=Callable[..., Any])

KEPT_BYTES = 1 << 30
"""How much rank 0 keeps in all of what it writes over."""
_LINKS = 40


def _on_real_files(method: Method) -> Method:
    @functools.wraps(method)
    def on_real_files(*args: Any, **kwargs: Any) -> Any:
        with real():
            return method(*args, **kwargs)

    return on_real_files  # type: ignore[return-value]


def spared_folders() -> list[str]:
    """Where every rank reads and writes for itself: no files, or caches that processes share."""
    home = os.path.expanduser("~")
    caches = [
        os.environ.get("XDG_CACHE_HOME", f"{home}/.cache"),
        f"{home}/.triton",
        *(os.environ[name] for name in _CACHES if os.environ.get(name)),
    ]
    compiled = os.path.join(os.path.realpath(tempfile.gettempdir()), "torchinductor_")
    return ["/dev/", "/proc/", "/sys/", compiled, *(f"{os.path.realpath(c)}/" for c in caches)]


_CACHES = (
    *("HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("TRITON_CACHE_DIR", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH"),
)


class Paths:
    """What both sides have in common: which file a path means."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        """The first one that knows a path is right."""
        self._spared = tuple(spared_folders())
        self._temporary: set[str] = set()
        self._followed: dict[str, str] = {}

    @_on_real_files
    def spare(self, path: str) -> None:
        """No other rank can mean this path, or anything below it: let it be."""
        self._temporary.add(os.path.realpath(path))

    def is_spared(self, plain: str) -> bool:
        """Whether every rank has this path for itself, or it is no file."""
        if f"{plain}/".startswith(self._spared):
            return True
        while self._temporary and len(plain) > 1:
            if plain in self._temporary:
                return True
            plain = os.path.dirname(plain)
        return False

    def mentions_temporary(self, text: str) -> bool:
        """Whether a text names something that only this rank has."""
        return any(path in text for path in self._temporary)

    def forget_links(self) -> None:
        """A link, or a folder that may have been one, has changed."""
        self._followed.clear()

    def plain(self, path: str | bytes | os.PathLike[Any]) -> str:
        """Absolute, without links on the way to the last name."""
        text = os.path.abspath(os.fsdecode(path))
        for layer in self.layers:
            text = layer.virtual(text)
        return self._without_links_above(text)

    def followed(self, path: str | bytes | os.PathLike[Any]) -> str:
        """The same, and not a link itself."""
        return self._follow(self.plain(path), 0)

    def find(self, plain: str) -> str:
        """Where a plain path lies; GONE if it does not exist, or did not when the job began."""
        if not self.is_spared(plain):
            for layer in self.layers:
                place = layer.find(plain)
                if place is not None:
                    return place
        return plain if os.path.lexists(plain) else GONE

    def _without_links_above(self, path: str, depth: int = 0) -> str:
        folder, name = os.path.split(path)
        if not name:
            return path
        if folder not in self._followed:
            above = self._without_links_above(folder, depth)
            self._followed[folder] = self._follow(above, depth)
        return os.path.join(self._followed[folder], name)

    def _follow(self, plain: str, depth: int) -> str:
        place = self.find(plain)
        if place == GONE or depth > _LINKS or not os.path.islink(place):
            return plain
        target = os.path.normpath(os.path.join(os.path.dirname(plain), os.readlink(place)))
        return self._follow(self._without_links_above(target, depth + 1), depth + 1)


class Keeper(Paths):
    """Rank 0: changes the files, and keeps what was there before."""

    def __init__(self, before: Layer) -> None:
        super().__init__(())
        self._before = before
        self._kept: set[str] = set()
        self._bytes = 0

    @_on_real_files
    def keep(
        self, path: str | bytes | os.PathLike[Any], *, follow: bool = True, unwritten: bool = False
    ) -> None:
        """Something will become of this path: remember what it was, unless that was done.

        `unwritten`: nobody will write into this file any more.
        """
        plain = self.followed(path) if follow else self.plain(path)
        if plain in self._kept or self.is_spared(plain):
            return
        self._kept.add(plain)
        if not os.path.lexists(plain):
            self._before.remove(plain)
        elif self._before.find(plain) is None and self._is_worth(os.lstat(plain)):
            # Elsewhere first: the others may look at any time.
            draft = self._before.room_for("/.instep-draft")
            _link_or_copy(plain, draft) if unwritten else copy(plain, draft)
            os.replace(draft, self._before.room_for(plain))

    @_on_real_files
    def keep_all(self, path: str | bytes | os.PathLike[Any]) -> None:
        """The same for a path and everything below it."""
        self.keep(path, follow=False)
        if os.path.isdir(path) and not os.path.islink(path):
            for name in os.listdir(os.fsdecode(path)):
                self.keep_all(os.path.join(os.fsdecode(path), name))

    def _is_worth(self, seen: os.stat_result) -> bool:
        if not stat.S_ISREG(seen.st_mode):
            return stat.S_ISDIR(seen.st_mode) or stat.S_ISLNK(seen.st_mode)
        self._bytes += seen.st_size
        return self._bytes <= KEPT_BYTES

    @_on_real_files
    def has_changed(self, folder: str) -> bool:
        """Whether this job has changed what is in this folder."""
        return any(map(bool, self._before.names(self.followed(folder))))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or a folder
        copy(source, target)


class Shadow(Paths):
    """Any other rank: writes into a layer of its own."""

    def __init__(self, own: Layer, before: Layer | None) -> None:
        super().__init__([layer for layer in (own, before) if layer is not None])
        self._own = own

    @_on_real_files
    def place(self, path: str | bytes | os.PathLike[Any], *, follow: bool = True) -> str:
        """Where to look for `path`: where it lies, or where there is nothing."""
        plain = self.followed(path) if follow else self.plain(path)
        return self.find(plain) or self._own.place(plain)

    @_on_real_files
    def folder(self, path: str | bytes | os.PathLike[Any]) -> str:
        """Where to go for the folder `path`: to the folder itself, if it is in sight."""
        plain = self.followed(path)
        place = self.find(plain) or self._own.place(plain)
        return plain if os.path.isdir(plain) and os.path.isdir(place) else place

    @_on_real_files
    def writable(self, path: str | bytes | os.PathLike[Any], flags: int = os.O_CREAT) -> str:
        """Where to open `path` with these flags, if not for reading only.

        Raises what one process would have got: FileExistsError, FileNotFoundError,
        PermissionError and so on.
        """
        plain = self.followed(path)
        if self.is_spared(plain):
            return plain
        found = self.find(plain)
        if found == GONE:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            self._check_folder(plain, path)
            return self._own.room_for(plain)
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        if os.path.isdir(found):
            raise _error(errno.EISDIR, path)
        if not stat.S_ISREG(os.stat(found).st_mode):
            return os.devnull  # a pipe or a device: rank 0 feeds it
        if not os.access(found, os.W_OK):
            raise _error(errno.EACCES, path)
        return self._own.room_for(plain) if flags & os.O_TRUNC else self._brought_up(plain)

    @_on_real_files
    def new(self, path: str | bytes | os.PathLike[Any]) -> str:
        """Where to make `path`, which must not exist. Raises FileExistsError and its like."""
        plain = self.plain(path)
        if self.is_spared(plain):
            return plain
        if self.find(plain) != GONE:
            raise _error(errno.EEXIST, path)
        self._check_folder(plain, path)
        return self._own.room_for(plain)

    @_on_real_files
    def unlink(self, path: str | bytes | os.PathLike[Any]) -> bool:
        """Let a file or link be gone; False where that is to be done to the path itself."""
        plain = self.plain(path)
        if self.is_spared(plain):
            return False
        found = self._existing(plain, path)
        if os.path.isdir(found) and not os.path.islink(found):
            raise _error(errno.EISDIR, path)
        self._own.remove(plain)
        self.forget_links()
        return True

    @_on_real_files
    def rmdir(self, path: str | bytes | os.PathLike[Any]) -> bool:
        """Let an empty folder be gone; False as above."""
        plain = self.plain(path)
        if self.is_spared(plain):
            return False
        found = self._existing(plain, path)
        if not os.path.isdir(found) or os.path.islink(found):
            raise _error(errno.ENOTDIR, path)
        if self.names(plain):
            raise _error(errno.ENOTEMPTY, path)
        self._own.remove(plain)
        self.forget_links()
        return True

    @_on_real_files
    def rename(self, source: str | bytes | os.PathLike[Any], target: Any) -> bool:
        """Move a file or a folder; False as above."""
        old, new = self.plain(source), self.plain(target)
        if self.is_spared(old) and self.is_spared(new):
            return False
        found = self._existing(old, source)
        self._check_folder(new, target)
        there = self.find(new)
        is_folder = os.path.isdir(found) and not os.path.islink(found)
        if there != GONE and os.path.isdir(there) and not os.path.islink(there):
            if not is_folder:
                raise _error(errno.EISDIR, target)
            if self.names(new):
                raise _error(errno.ENOTEMPTY, target)
        if old != new:
            self._move(old, new)
            self.forget_links()
        return True

    def _move(self, old: str, new: str) -> None:
        found = self.find(old)
        names = self.names(old) if os.path.isdir(found) and not os.path.islink(found) else ()
        if self.is_spared(new):
            copy(found, new)
        else:
            self._own.remove(new)
            copy(found, self._own.room_for(new))
        for name in names:
            self._move(os.path.join(old, name), os.path.join(new, name))
        if self.is_spared(old):
            os.rmdir(old) if os.path.isdir(found) else os.unlink(old)
        else:
            self._own.remove(old)

    @_on_real_files
    def own(self, path: str | bytes | os.PathLike[Any], *, follow: bool = True) -> str | None:
        """Where `path` lies, if that is this rank's own: its mode and times may be changed."""
        plain = self.followed(path) if follow else self.plain(path)
        found = self._existing(plain, path)
        mine = self.is_spared(plain) or self._own.find(plain) == found
        return found if mine else None

    @_on_real_files
    def listed(self, path: str | bytes | os.PathLike[Any]) -> list[str] | None:
        """The names in a folder where this job may have changed them; None where it has not."""
        plain = self.followed(path)
        if self.is_spared(plain) or not any(any(layer.names(plain)) for layer in self.layers):
            return None
        found = self._existing(plain, path)
        if not os.path.isdir(found):
            raise _error(errno.ENOTDIR, path)
        names = self.names(plain)
        return sorted(names) if any(self._own.names(plain)) else names

    def names(self, plain: str) -> list[str]:
        """The names in a folder, those that have always been there first and in their order."""
        names = dict.fromkeys(os.listdir(plain)) if os.path.isdir(plain) else {}
        if not self.is_spared(plain):
            for layer in reversed(self.layers):
                there, gone = layer.names(plain)
                names = dict.fromkeys(name for name in (*names, *there) if name not in gone)
        return list(names)

    def virtual(self, place: str) -> str:
        """The path that lies at `place`."""
        for layer in self.layers:
            place = layer.virtual(place)
        return place

    def _existing(self, plain: str, path: object) -> str:
        found = self.find(plain)
        if found == GONE:
            raise _error(errno.ENOENT, path)
        return found

    def _check_folder(self, plain: str, path: object) -> None:
        """Whether something can be made here."""
        folder = self._existing(os.path.dirname(plain), path)
        if not os.path.isdir(folder):
            raise _error(errno.ENOTDIR, path)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _error(errno.EACCES, path)

    def _brought_up(self, plain: str) -> str:
        """This rank's own copy of a file, as it is."""
        found = self.find(plain)
        place = self._own.room_for(plain)
        if found != place:
            copy(found, place)
        return place


def _error(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), path)
