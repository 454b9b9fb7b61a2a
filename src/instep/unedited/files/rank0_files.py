"""Rank 0 changes the files, for all. What the others may still have to read it keeps."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from instep.unedited.files.layers import GONE, Layer, clone, copy
from instep.unedited.files.paths import Path, Paths, on_real_files

KEPT_BYTES = 1 << 30
"""How much rank 0 keeps in all of what it writes over."""


class Rank0Files(Paths):
    """Rank 0: changes the files, and keeps what was there before."""

    def __init__(self, before: Layer) -> None:
        super().__init__(())
        self._before = before
        self._earlier: Callable[[], list[Layer]] = list
        self._kept: set[str] = set()
        self._bytes = 0

    def rebase(self, before: Layer, earlier: Callable[[], list[Layer]]) -> None:
        """From now on keep what the files are now; `earlier()`: layers that are still looked at."""
        self._before, self._earlier = before, earlier
        self._kept.clear()
        self._bytes = 0
        self.forget_links()

    @on_real_files
    def keep(self, path: Path, *, follow: bool = True, unwritten: bool = False) -> None:
        """Something will become of this path: remember what it was, unless that was done.

        `unwritten`: nobody will write into this file any more.
        """
        try:
            plain = self.followed(path) if follow else self.plain(path)
        except OSError:  # links in a circle: who uses this path is told
            return
        if plain in self._kept or self.is_spared(plain):
            return
        self._kept.add(plain)
        if not os.path.lexists(plain):
            self._before.remove(plain)
        elif self._before.find(plain) is None:
            mode = os.lstat(plain).st_mode
            if stat.S_ISDIR(mode):
                self._before.keep_folder(plain)
            elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
                self._keep_file(plain, unwritten)
        for layer in self._earlier():
            if layer.find(plain) is None:
                self._hand_down(plain, layer)

    def _keep_file(self, plain: str, unwritten: bool) -> None:
        """Elsewhere first: the others may look at any time."""
        draft = self._before.room_for(f"/.instep-{os.getpid()}")
        if not ((unwritten and _linked(plain, draft)) or clone(plain, draft)):
            self._bytes += os.lstat(plain).st_size
            if self._bytes > KEPT_BYTES or not _copied(plain, draft):
                self._before.lose(plain)
                return
        os.replace(draft, self._before.room_for(plain))

    def _hand_down(self, plain: str, layer: Layer) -> None:
        """An earlier layer, which does not know this path, keeps what this one does."""
        place = self._before.find(plain)
        if place == GONE:
            layer.remove(plain)
        elif place is None:
            return
        elif self._before.has_lost(plain, place):
            layer.lose(plain)
        elif os.path.isdir(place) and not os.path.islink(place):
            layer.keep_folder(plain)
        else:
            target = layer.room_for(plain)
            if not _linked(place, target):
                copy(place, target)

    @on_real_files
    def keep_both(self, source: Path, target: Path) -> None:
        """One will become the other: remember what both were, and everything below them."""
        self.keep(source, follow=False)
        self.keep(target, follow=False)
        if os.path.isdir(source) and not os.path.islink(source):
            for name in os.listdir(os.fsdecode(source)):
                below = (os.path.join(os.fsdecode(path), name) for path in (source, target))
                self.keep_both(*below)

    @on_real_files
    def has_changed(self, folder: str) -> bool:
        """Whether this job has changed what is in this folder."""
        try:
            return any(self._before.names(self.followed(folder)))
        except OSError:  # links in a circle: who uses this path is told
            return False


def _copied(source: str, target: str) -> bool:
    """False where there is no room for it."""
    try:
        copy(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.unlink(target)
        return False
    return True


def _linked(source: str, target: str) -> bool:
    if os.lstat(source).st_nlink > 1:  # it can be written into by another name
        return False
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system
        return False
    return True
