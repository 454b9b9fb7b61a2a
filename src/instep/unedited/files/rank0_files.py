"""Rank 0 changes the real files, and keeps what the other ranks may still have to read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident

from instep.unedited.files.atomic_writes import atomic_write
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.layers.layer import MISSING, Layer, clone, copy, is_directory
from instep.unedited.files.paths import PathResolver, StrOrBytesPath

KEPT_BYTES = 1 << 30
"""How much of what it writes over rank 0 copies in one generation."""
KNOWN_PATHS = 10_000
"""How many paths rank 0 knows to be kept without a look at the layer."""


class Rank0Files(PathResolver):
    """Keeps what was at a path in the `before` layer, before the path is changed."""

    def __init__(self, before: Layer) -> None:
        super().__init__(())
        self._before = before
        self._earlier: Callable[[], list[Layer]] = list
        self._kept: dict[str, None] = {}
        """Paths that are kept: the latest ones."""
        self._bytes = 0

    def start_generation(self, before: Layer, earlier: Callable[[], list[Layer]]) -> None:
        """From now on keep what the files are now. `earlier()`: layers that ranks still read."""
        self._before, self._earlier = before, earlier
        self._kept.clear()
        self._bytes = 0
        self.clear_links()

    @bypass_overlay()
    def keep(
        self, path: StrOrBytesPath, *, follow: bool = True, never_written_again: bool = False
    ) -> None:
        try:
            resolved = self.resolve(path) if follow else self.resolve_parents(path)
        except OSError:  # a loop of links: the function that uses the path raises it
            return
        if self.is_private(resolved):
            return
        self.changed[get_ident()] = resolved
        if resolved in self._kept:
            return
        self._kept[resolved] = None
        if len(self._kept) > KNOWN_PATHS:
            del self._kept[next(iter(self._kept))]
        if not self._before.is_below_link(resolved):
            self._keep_entry(resolved, never_written_again)
        for layer in self._earlier():
            if not layer.is_below_link(resolved) and layer.find(resolved) is None:
                self._copy_to_earlier(resolved, layer)

    def _keep_entry(self, resolved: str, never_written_again: bool) -> None:
        """Keep what is at a path, unless the layer has what was there before. Below a link that
        has gone by now nothing is kept: while it was there, nothing had this path."""
        kept = self._before.find(resolved)
        if kept not in (None, MISSING):
            return
        if not os.path.lexists(resolved):
            self._before.remove(resolved)
        elif kept is None:
            mode = os.lstat(resolved).st_mode
            if stat.S_ISDIR(mode):
                self._before.copy_directory(resolved)
            elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
                self._keep_file(resolved, never_written_again)

    def _keep_file(self, resolved: str, never_written_again: bool) -> None:
        """Copy to a draft first, because other ranks may look at any time."""
        draft = self._before.add_file(f"/.instep-{os.getpid()}")
        linked = never_written_again and _try_link(resolved, draft)
        if not (linked or clone(resolved, draft)):
            size = os.lstat(resolved).st_size
            if self._bytes + size > KEPT_BYTES or not _try_copy(resolved, draft):
                self._before.copy_metadata(resolved)
                return
            self._bytes += size
        os.replace(draft, self._before.add_file(resolved))

    def _copy_to_earlier(self, resolved: str, layer: Layer) -> None:
        """Copy the present entry of a path to an earlier layer, which has none."""
        location = self._before.find(resolved)
        if location == MISSING or self._before.is_below_link(resolved):
            layer.remove(resolved)
        elif location is None:
            return
        elif self._before.is_metadata_only(resolved, location):
            layer.copy_metadata(resolved)
        elif is_directory(location):
            layer.copy_directory(resolved)
        else:
            target = layer.add_file(resolved)
            if not _try_link(location, target):
                copy(location, target)

    def location_to_replace(self, path: StrOrBytesPath) -> AbstractContextManager[str]:
        return atomic_write(path, self)

    def new_location(self, path: StrOrBytesPath, *, directory: bool = False) -> StrOrBytesPath:
        changed = self.changed.get(get_ident(), "")
        self.keep(path, follow=False)
        if os.path.lexists(path):  # as for makedirs(path, exist_ok=True)
            self.changed[get_ident()] = changed
        return path

    def rename(self, source: StrOrBytesPath, target: StrOrBytesPath) -> bool:
        self._keep_rename(source, target)
        self.clear_links()
        return False

    @bypass_overlay()
    def _keep_rename(self, source: StrOrBytesPath, target: StrOrBytesPath) -> None:
        """Keep what is at both paths and below them, before one is renamed to the other."""
        self.keep(source, follow=False)
        self.keep(target, follow=False)
        if is_directory(os.fsdecode(source)):
            for name in os.listdir(os.fsdecode(source)):
                below = (os.path.join(os.fsdecode(path), name) for path in (source, target))
                self._keep_rename(*below)

    @bypass_overlay()
    def has_changed(self, directory: StrOrBytesPath) -> bool:
        try:
            return any(self._before.names(self.resolve(directory)))
        except OSError:  # a loop of links, as above
            return False


def _try_copy(source: str, target: str) -> bool:
    """Copy a file; False if the file system is full."""
    try:
        copy(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.unlink(target)
        return False
    return True


def _try_link(source: str, target: str) -> bool:
    """Make a hard link; False if the file has another name by which a process can write into it."""
    if os.lstat(source).st_nlink > 1:
        return False
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system
        return False
    return True
