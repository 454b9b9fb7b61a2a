"""A rank other than 0 writes into a layer of its own, and reads through its layers."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any

from instep.unedited.errors import UneditedError
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.layers.layer import MISSING, Layer, copy, is_directory, real_lstat
from instep.unedited.files.paths import (
    CURRENT,
    PathResolver,
    StrOrBytesPath,
    path_error,
    retry_if_changed,
    script_paths_in_errors,
)

CHECKPOINT_BYTES = 2 << 30
"""How much a rank's own checkpoints may take in all, without the last one."""


class OverlayFiles(PathResolver):
    """The files as a rank other than 0 sees them: its own layer, `before`, and the real files."""

    def __init__(self, rank_layer: Layer, before: Layer | None) -> None:
        super().__init__([layer for layer in (rank_layer, before) if layer is not None])
        self._rank_layer = rank_layer
        self._checkpoints: dict[str, int] = {}
        with suppress(FileNotFoundError):  # it has been removed
            self.open_directories.add(CURRENT, self.open_directories.path_of(CURRENT))

    def start_generation(self) -> None:
        """Forget what was known of the layers of the generation before."""
        self._checkpoints.clear()
        self.clear_links()

    @bypass_overlay()
    def location(self, path: StrOrBytesPath, *, follow: bool = True) -> str:
        """The location of `path`. Raises FileNotFoundError or NotADirectoryError."""
        return self._existing(self.resolve(path) if follow else self.resolve_parents(path), path)

    @bypass_overlay()
    def location_to_read(self, path: StrOrBytesPath) -> str:
        resolved = self.resolve(path)
        location = self._existing(resolved, path)
        self._check_content(resolved, location)
        return location

    def use(
        self,
        path: StrOrBytesPath,
        function: Callable[[Any], Any],
        discard: Callable[[Any], object] = lambda result: None,
        *,
        follow: bool = True,
        reads_content: bool = False,
    ) -> Any:
        """As in the base class; with `discard` of a result that is not to be used."""
        with script_paths_in_errors(path):
            is_installed, result = self.use_installed(path, function, discard, follow=follow)
            if is_installed:
                return result
            location = ""
            while True:
                previous = location
                if reads_content:
                    location = self.location_to_read(path)
                else:
                    location = self.location(path, follow=follow)
                try:
                    result = function(location)
                except OSError:
                    if location == previous or self.find_before(location) is None:
                        raise
                else:
                    if location == previous or self.find_before(location) is None:
                        return result
                    discard(result)

    def use_installed(
        self,
        path: StrOrBytesPath,
        function: Callable[[str], Any],
        discard: Callable[[Any], object],
        *,
        follow: bool = True,
    ) -> tuple[bool, Any]:
        """The same, only if it belongs to an installation in which this job has changed nothing.

        Returns whether it does, and the result. That takes 4 system calls instead of a hundred.
        """
        text = os.fspath(path)
        directory, _, name = text.rpartition("/") if isinstance(text, str) else ("", "", "")
        parent = self.followed.get(directory)
        if parent is None or name in ("", ".", ".."):
            return False, None
        location = f"{parent}/{name}" if parent != "/" else f"/{name}"
        flag = self._rank_layer.change_flag(location)
        if flag is None:
            return False, None
        try:
            if follow and stat.S_ISLNK(real_lstat(location).st_mode):
                return False, None
            result = function(location)
        except OSError as error:
            if self.has_flag(flag):
                return False, None
            error.filename = path
            raise
        if not self.has_flag(flag):  # looked at last, since rank 0 works at the same time
            return True, result
        discard(result)
        return False, None

    @bypass_overlay()
    def record_open(self, fd: int, path: StrOrBytesPath) -> None:
        """Record that the script has opened `path`, if it is a directory."""
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self.open_directories.add(fd, self.resolve(path))

    def _check_content(self, resolved: str, location: str) -> None:
        if any(layer.is_metadata_only(resolved, location) for layer in self.layers):
            size = os.path.getsize(location) / 2**30
            raise UneditedError(
                f"this rank reads {resolved} ({size:.1f} GiB) after rank 0 has written over it. "
                "Rank 0 keeps at most 1 GiB of what it writes over, less if TMPDIR is full, more "
                "only if TMPDIR is on the same file system and that shares blocks (btrfs, XFS). "
                "Write the new content under another name."
            )

    @bypass_overlay()
    @retry_if_changed
    def change_directory(self, path: StrOrBytesPath) -> bool:
        resolved = self.resolve(path)
        location = self._existing(resolved, path)
        is_real = os.path.isdir(resolved) and os.path.isdir(location)
        os.chdir(resolved if is_real else location)  # the real one if it is visible
        self.open_directories.add(CURRENT, resolved)
        return True

    def own_directory(self) -> str:
        return self.current_directory()

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

    @bypass_overlay()
    @retry_if_changed
    def own_location(self, path: StrOrBytesPath, *, follow: bool = True) -> str | None:
        resolved = self.resolve(path) if follow else self.resolve_parents(path)
        found = self._existing(resolved, path)
        is_own = self.is_private(resolved) or self._rank_layer.find(resolved) == found
        return found if is_own else None

    @bypass_overlay()
    @retry_if_changed
    def listdir(self, path: StrOrBytesPath) -> list[str] | None:
        resolved = self.resolve(path)
        found = self._existing(resolved, path)
        if found == resolved and not any(any(layer.names(resolved)) for layer in self.layers):
            return None
        if not os.path.isdir(found):
            raise path_error(errno.ENOTDIR, path)
        names = self.names(resolved)
        return sorted(names) if any(self._rank_layer.names(resolved)) else names

    def names(self, resolved: str) -> list[str]:
        """The names in a directory: first those of the real one, in their order."""
        names: dict[str, None] = {}
        if is_directory(resolved) and self._parents_unchanged(resolved):
            with suppress(FileNotFoundError):  # rank 0 has just removed it, and kept its entries
                names = dict.fromkeys(os.listdir(resolved))
        if not self.is_private(resolved):
            for layer in reversed(self.layers):
                there, whiteouts = layer.names(resolved)
                lower = () if layer.masks(resolved) else names
                names = dict.fromkeys(name for name in (*lower, *there) if name not in whiteouts)
        return list(names)

    def _existing(self, resolved: str, path: object) -> str:
        """The location of a path, or the error that one process would get."""
        found = self.find(resolved)
        if found != MISSING:
            return found
        parent = resolved
        while found == MISSING:
            parent = os.path.dirname(parent)
            found = self.find(parent)
        raise path_error(errno.ENOENT if os.path.isdir(found) else errno.ENOTDIR, path)

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
