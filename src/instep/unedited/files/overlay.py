"""A rank other than 0 writes into a layer of its own; how it reads is in `overlay_reads`."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from threading import get_ident

from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.layers.layer import MISSING, Layer, copy, is_directory
from instep.unedited.files.overlay_reads import OverlayReads
from instep.unedited.files.paths import (
    StrOrBytesPath,
    path_error,
    retry_if_changed,
    script_paths_in_errors,
)

CHECKPOINT_BYTES = 2 << 30
"""How much a rank's own checkpoints may take in all, without the last one."""


class OverlayFiles(OverlayReads):
    """The files as a rank other than 0 sees them: its own layer, `before`, and the real files."""

    def __init__(self, rank_layer: Layer, before: Layer | None) -> None:
        super().__init__(rank_layer, before)
        self._checkpoints: dict[str, int] = {}
        """The sizes of this rank's own, the oldest first."""

    def start_generation(self) -> None:
        """Forget what was known of the layers of the generation before."""
        self._checkpoints.clear()
        self.clear_links()

    @bypass_overlay()
    @retry_if_changed
    def location_to_write(self, path: StrOrBytesPath, flags: int) -> str:
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        resolved = self.resolve_parents(path) if exclusive else self.resolve(path)
        if self.is_private(resolved):
            return resolved
        self.changed[get_ident()] = resolved
        return self._write_location(resolved, self.find(resolved), path, flags)

    def _write_location(self, resolved: str, found: str, path: StrOrBytesPath, flags: int) -> str:
        if found == MISSING:
            if not flags & os.O_CREAT:
                self._existing(resolved, path)
            self._check_parent(resolved, path)
            return self._rank_layer.add_file(resolved)
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise path_error(errno.EEXIST, path)
        if os.path.isdir(found):
            raise path_error(errno.EISDIR, path)
        if not stat.S_ISREG(os.stat(found).st_mode):  # a pipe or a device, which rank 0 writes to
            made_here = self._rank_layer.find(resolved) == found  # this rank also reads from it
            return found if made_here else os.devnull
        if not os.access(found, os.W_OK):
            raise _denied(found, path)
        return (
            self._rank_layer.add_file(resolved) if flags & os.O_TRUNC else self._copy_up(resolved)
        )

    @bypass_overlay()
    def record_checkpoint(self, path: StrOrBytesPath) -> None:
        resolved = self.resolve(path)
        self._checkpoints.pop(resolved, None)
        found = self.find(resolved)
        if found != resolved:
            self._checkpoints[resolved] = os.path.getsize(found)
        while len(self._checkpoints) > 1 and sum(self._checkpoints.values()) > CHECKPOINT_BYTES:
            oldest = next(iter(self._checkpoints))
            del self._checkpoints[oldest]
            if self._rank_layer.find(oldest) and os.path.exists(oldest):
                self._rank_layer.release(oldest)

    @bypass_overlay()
    @retry_if_changed
    def new_location(self, path: StrOrBytesPath, *, directory: bool = False) -> str:
        resolved = self.resolve_parents(path)
        if self.is_private(resolved):
            return resolved
        self._check_new(resolved, path)
        self.changed[get_ident()] = resolved
        layer = self._rank_layer
        return layer.add_directory(resolved) if directory else layer.add_file(resolved)

    def unlink(self, path: StrOrBytesPath) -> bool:
        return self._remove(path, is_rmdir=False)

    def rmdir(self, path: StrOrBytesPath) -> bool:
        return self._remove(path, is_rmdir=True)

    @bypass_overlay()
    @retry_if_changed
    def _remove(self, path: StrOrBytesPath, *, is_rmdir: bool) -> bool:
        with script_paths_in_errors(path):
            resolved = self.resolve_parents(path)
            if self.is_private(resolved):
                return False
            if is_directory(self._existing(resolved, path)) != is_rmdir:
                raise path_error(errno.ENOTDIR if is_rmdir else errno.EISDIR, path)
            if is_rmdir and self.names(resolved):
                raise path_error(errno.ENOTEMPTY, path)
            self._check_parent(resolved, path)
            self.changed[get_ident()] = resolved
            self._rank_layer.remove(resolved)
            self.clear_links()
            if is_rmdir:
                self.open_directories.rename(resolved, None)
            return True

    def rename(self, source: StrOrBytesPath, target: StrOrBytesPath) -> bool:
        with script_paths_in_errors(source, target), bypass_overlay():
            old = self.resolve_parents(source)
            self._check_parent(old, source)
            new = self.resolve_parents(target)
            if self.is_private(old) and self.is_private(new):
                return False
            self._check_parent(new, target)
            self._existing(old, source)
            if old != new and not self._is_same_file(old, new):
                self._check_rename(old, new)
                self._rename(old, new)
                self.open_directories.rename(new, None)
                self.open_directories.rename(old, new)
                self.clear_links()
            return True

    def _check_rename(self, old: str, new: str) -> None:
        if new.startswith(f"{old}/"):
            raise path_error(errno.EINVAL, old)
        if old.startswith(f"{new}/"):
            raise path_error(errno.ENOTEMPTY, old)
        there = self.find(new)
        if is_directory(self.find(old)):
            if there != MISSING and not is_directory(there):
                raise path_error(errno.ENOTDIR, old)
            if there != MISSING and self.names(new):
                raise path_error(errno.ENOTEMPTY, old)
        elif is_directory(there):
            raise path_error(errno.EISDIR, old)

    def _is_same_file(self, *paths: str) -> bool:
        """Whether these are links to one file; rename does nothing then."""
        one, two = map(self.find, paths)
        return MISSING not in (one, two) and os.path.samestat(os.lstat(one), os.lstat(two))

    def _rename(self, old: str, new: str) -> None:
        found = self.find(old)
        if is_directory(found):
            self._put(found, new)
            for name in self.names(old):
                self._rename(os.path.join(old, name), os.path.join(new, name))
        else:
            self._put(found if self.is_private(new) else self._copy_up(old), new)
        if self.is_private(old):
            os.rmdir(old) if is_directory(old) else os.unlink(old)
        else:
            self._rank_layer.remove(old)

    def _put(self, location: str, new: str) -> None:
        """Link or copy what is at `location` to the path `new`; a directory without its entries."""
        if self.is_private(new):
            copy(location, new)
            return
        self.changed[get_ident()] = new
        self._rank_layer.remove(new)
        if is_directory(location):
            copy(location, self._rank_layer.add_directory(new))
            return
        target = self._rank_layer.add_file(new)
        try:
            os.link(location, target, follow_symlinks=False)
        except OSError:  # from another file system
            copy(location, target)

    def link(self, source: StrOrBytesPath, target: StrOrBytesPath) -> bool:
        self.clear_links()
        with script_paths_in_errors(source, target), bypass_overlay():
            old = self.resolve_parents(source)
            found = self._existing(old, source)
            new = self.resolve_parents(target)
            self._check_new(new, target)
            if is_directory(found):
                raise path_error(errno.EPERM, source)
            self._put(self._copy_up(old), new)
            return True

    def symlink(self, source: StrOrBytesPath, target: StrOrBytesPath) -> bool:
        self.clear_links()
        with script_paths_in_errors(source, target), bypass_overlay():
            os.symlink(source, self.new_location(target))
            return True

    def _check_new(self, resolved: str, path: object) -> None:
        """Raise unless nothing is here yet and something can be made."""
        if self.find(resolved) != MISSING:
            raise path_error(errno.EEXIST, path)
        self._check_parent(resolved, path)

    def _check_parent(self, resolved: str, path: object) -> None:
        """Raise unless the directory above exists and may be written to."""
        directory = self._existing(os.path.dirname(resolved), path)
        if not os.path.isdir(directory):
            raise path_error(errno.ENOTDIR, path)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise _denied(directory, path)

    def _copy_up(self, resolved: str) -> str:
        """Copy a file into this rank's layer and return its location; private files stay."""
        found = self.find(resolved)
        if self.is_private(resolved):
            return found
        self._check_content(resolved, found)
        location = self._rank_layer.add_file(resolved)
        if found == resolved:
            self._copy_real(resolved, location)
        elif found != location:
            copy(found, location)
        return location

    def _copy_real(self, resolved: str, location: str) -> None:
        """Copy the real file, or what rank 0 has kept of it if it changes the file meanwhile."""
        try:
            copy(resolved, location)
        except FileNotFoundError:
            if self.find_before(resolved) is None:
                raise
        kept = self.find_before(resolved)
        if kept is not None:
            with suppress(FileNotFoundError):
                os.unlink(location)
            self._check_content(resolved, kept)
            copy(kept, location)


def _denied(location: str, path: object) -> OSError:
    is_read_only = os.statvfs(location).f_flag & os.ST_RDONLY
    return path_error(errno.EROFS if is_read_only else errno.EACCES, path)
