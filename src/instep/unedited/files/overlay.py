"""A rank other than 0 writes into a layer of its own, and reads what it finds through it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from instep.unedited.errors import UneditedError
from instep.unedited.files.layers import GONE, Layer, copy
from instep.unedited.files.paths import Path, Paths, on_real_files, path_error

SAVED_BYTES = 2 << 30
"""How much a rank's own checkpoints may take in all, but for the last one."""


class OverlayFiles(Paths):
    """Any other rank: writes into a layer of its own."""

    def __init__(self, own: Layer, before: Layer | None) -> None:
        super().__init__([layer for layer in (own, before) if layer is not None])
        self._own = own
        self._saved: dict[str, int] = {}

    def forget(self) -> None:
        """The layers are others by now."""
        self._saved.clear()
        self.forget_links()

    @on_real_files
    def place(self, path: Path, *, follow: bool = True) -> str:
        """Where `path` lies. Raises FileNotFoundError or NotADirectoryError."""
        return self._existing(self.followed(path) if follow else self.plain(path), path)

    @on_real_files
    def readable(self, path: Path) -> str:
        """Where to read `path`. Raises as above; UneditedError where it was too large to keep."""
        plain = self.followed(path)
        place = self._existing(plain, path)
        self._check_kept(plain, place)
        return place

    @on_real_files
    def opened(self, fd: int, path: Path) -> None:
        """The script has opened `path`: if that is a folder, paths may be relative to it."""
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self.open_folders.opened(fd, self.followed(path))

    def _check_kept(self, plain: str, place: str) -> None:
        if any(layer.has_lost(plain, place) for layer in self.layers):
            raise UneditedError.not_kept(plain, os.path.getsize(place))

    @on_real_files
    def folder(self, path: Path) -> str:
        """Where to go for the folder `path`: to the folder itself, if it is in sight."""
        plain = self.followed(path)
        place = self._existing(plain, path)
        return plain if os.path.isdir(plain) and os.path.isdir(place) else place

    @on_real_files
    def writable(self, path: Path, flags: int = os.O_CREAT) -> str:
        """Where to open `path` with these flags, if not for reading only.

        Raises what one process would have got: FileExistsError, FileNotFoundError,
        PermissionError and so on.
        """
        anew = flags & os.O_CREAT and flags & os.O_EXCL
        plain = self.plain(path) if anew else self.followed(path)
        if self.is_spared(plain):
            return plain
        found = self.find(plain)
        try:
            return self._to_write(plain, found, path, flags)
        except OSError:
            if self.find(plain) == found:
                raise
            return self.writable(path, flags)  # rank 0 has just changed what was found

    def _to_write(self, plain: str, found: str, path: Path, flags: int) -> str:
        if found == GONE:
            if not flags & os.O_CREAT:
                self._existing(plain, path)
            self._check_folder(plain, path)
            return self._own.room_for(plain)
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise path_error(errno.EEXIST, path)
        if os.path.isdir(found):
            raise path_error(errno.EISDIR, path)
        if not stat.S_ISREG(os.stat(found).st_mode):
            mine = self._own.find(plain) == found  # made by this rank, which also reads from it
            return found if mine else os.devnull  # else a pipe or a device: rank 0 feeds it
        if not os.access(found, os.W_OK):
            raise path_error(errno.EACCES, path)
        return self._own.room_for(plain) if flags & os.O_TRUNC else self._brought_up(plain)

    @on_real_files
    def saved(self, path: Path) -> None:
        """A checkpoint is written. The oldest ones go: by now rank 0's are whole, and are read."""
        plain = self.followed(path)
        self._saved.pop(plain, None)
        found = self.find(plain)
        if found != plain:
            self._saved[plain] = os.path.getsize(found)
        while len(self._saved) > 1 and sum(self._saved.values()) > SAVED_BYTES:
            oldest = next(iter(self._saved))
            del self._saved[oldest]
            if self._own.find(oldest) and os.path.exists(oldest):
                self._own.release(oldest)

    @on_real_files
    def new(self, path: Path, *, folder: bool = False) -> str:
        """Where to make `path`, which must not exist. Raises FileExistsError and its like."""
        plain = self.plain(path)
        if self.is_spared(plain):
            return plain
        self._check_new(plain, path)
        return self._own.room_for_folder(plain) if folder else self._own.room_for(plain)

    @on_real_files
    def unlink(self, path: Path) -> bool:
        """Let a file or link be gone; False where that is to be done to the path itself."""
        plain = self.plain(path)
        if self.is_spared(plain):
            return False
        found = self._existing(plain, path)
        if self._is_folder(found):
            raise path_error(errno.EISDIR, path)
        self._check_folder(plain, path)
        self._own.remove(plain)
        self.forget_links()
        return True

    @on_real_files
    def rmdir(self, path: Path) -> bool:
        """Let an empty folder be gone; False as above."""
        plain = self.plain(path)
        if self.is_spared(plain):
            return False
        found = self._existing(plain, path)
        if not self._is_folder(found):
            raise path_error(errno.ENOTDIR, path)
        if self.names(plain):
            raise path_error(errno.ENOTEMPTY, path)
        self._check_folder(plain, path)
        self._own.remove(plain)
        self.open_folders.moved(plain, None)
        self.forget_links()
        return True

    @on_real_files
    def rename(self, source: Path, target: Path) -> bool:
        """Move a file or a folder; False as above."""
        old = self.plain(source)
        self._check_folder(old, source)
        new = self.plain(target)
        if self.is_spared(old) and self.is_spared(new):
            return False
        self._check_folder(new, target)
        self._existing(old, source)
        if old != new and not self._same_file(old, new):
            self._check_move(old, new)
            self._move(old, new)
            self.open_folders.moved(new, None)
            self.open_folders.moved(old, new)
            self.forget_links()
        return True

    def _check_move(self, old: str, new: str) -> None:
        if new.startswith(f"{old}/"):
            raise path_error(errno.EINVAL, old)
        if old.startswith(f"{new}/"):
            raise path_error(errno.ENOTEMPTY, old)
        there = self.find(new)
        if self._is_folder(self.find(old)):
            if there != GONE and not self._is_folder(there):
                raise path_error(errno.ENOTDIR, old)
            if there != GONE and self.names(new):
                raise path_error(errno.ENOTEMPTY, old)
        elif self._is_folder(there):
            raise path_error(errno.EISDIR, old)

    @staticmethod
    def _is_folder(place: str) -> bool:
        return os.path.isdir(place) and not os.path.islink(place)

    def _same_file(self, *paths: str) -> bool:
        """Whether these are links to one file; rename leaves such alone."""
        one, two = map(self.find, paths)
        return GONE not in (one, two) and os.path.samestat(os.lstat(one), os.lstat(two))

    def _move(self, old: str, new: str) -> None:
        found = self.find(old)
        if self._is_folder(found):
            self._put(found, new)
            for name in self.names(old):
                self._move(os.path.join(old, name), os.path.join(new, name))
        else:
            self._put(found if self.is_spared(new) else self._brought_up(old), new)
        if self.is_spared(old):
            os.rmdir(old) if self._is_folder(old) else os.unlink(old)
        else:
            self._own.remove(old)

    def _put(self, place: str, new: str) -> None:
        """Let what lies at `place`, a folder without what is in it, be at `new`."""
        if self.is_spared(new):
            copy(place, new)
            return
        self._own.remove(new)
        if self._is_folder(place):
            copy(place, self._own.room_for_folder(new))
            return
        target = self._own.room_for(new)
        try:
            os.link(place, target, follow_symlinks=False)
        except OSError:  # from another file system
            copy(place, target)

    @on_real_files
    def link(self, source: Path, target: Path) -> None:
        """Give a file another name. Raises what os.link would."""
        old = self.plain(source)
        found = self._existing(old, source)
        new = self.plain(target)
        self._check_new(new, target)
        if self._is_folder(found):
            raise path_error(errno.EPERM, source)
        self._put(self._brought_up(old), new)

    @on_real_files
    def own(self, path: Path, *, follow: bool = True) -> str | None:
        """Where `path` lies, if that is this rank's own: its mode and times may be changed."""
        plain = self.followed(path) if follow else self.plain(path)
        found = self._existing(plain, path)
        mine = self.is_spared(plain) or self._own.find(plain) == found
        return found if mine else None

    @on_real_files
    def listed(self, path: Path) -> list[str] | None:
        """The names in a folder where this job may have changed them; None where it has not."""
        plain = self.followed(path)
        found = self._existing(plain, path)
        if found == plain and not any(any(layer.names(plain)) for layer in self.layers):
            return None
        if not os.path.isdir(found):
            raise path_error(errno.ENOTDIR, path)
        names = self.names(plain)
        return sorted(names) if any(self._own.names(plain)) else names

    def names(self, plain: str) -> list[str]:
        """The names in a folder, those that have always been there first and in their order."""
        names: dict[str, None] = {}
        if self._is_folder(plain) and self._is_itself(plain):
            names = dict.fromkeys(os.listdir(plain))
        if not self.is_spared(plain):
            for layer in reversed(self.layers):
                there, gone = layer.names(plain)
                below = () if layer.hides(plain) else names
                names = dict.fromkeys(name for name in (*below, *there) if name not in gone)
        return list(names)

    def virtual(self, place: str) -> str:
        """The path that lies at `place`."""
        for layer in self.layers:
            place = layer.virtual(place)
        return place

    def _existing(self, plain: str, path: object) -> str:
        found = self.find(plain)
        if found != GONE:
            return found
        above = plain
        while found == GONE:
            above = os.path.dirname(above)
            found = self.find(above)
        raise path_error(errno.ENOENT if os.path.isdir(found) else errno.ENOTDIR, path)

    def _check_new(self, plain: str, path: object) -> None:
        """Whether nothing is here yet, and something can be made."""
        if self.find(plain) != GONE:
            raise path_error(errno.EEXIST, path)
        self._check_folder(plain, path)

    def _check_folder(self, plain: str, path: object) -> None:
        """Whether something can be made here."""
        folder = self._existing(os.path.dirname(plain), path)
        if not os.path.isdir(folder):
            raise path_error(errno.ENOTDIR, path)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise path_error(errno.EACCES, path)

    def _brought_up(self, plain: str) -> str:
        """This rank's own copy of a file, as it is; what is spared stays where it is."""
        found = self.find(plain)
        if self.is_spared(plain):
            return found
        self._check_kept(plain, found)
        place = self._own.room_for(plain)
        if found == plain:
            self._copy_real(plain, place)
        elif found != place:
            copy(found, place)
        return place

    def _copy_real(self, plain: str, place: str) -> None:
        """Copy what lies at `plain` itself, or what rank 0 has kept of it if it changes it now."""
        try:
            copy(plain, place)
        except FileNotFoundError:
            if self.kept(plain) is None:
                raise
        kept = self.kept(plain)
        if kept is not None:
            with suppress(FileNotFoundError):
                os.unlink(place)
            self._check_kept(plain, kept)
            copy(kept, place)
