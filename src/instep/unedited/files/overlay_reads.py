"""How a rank other than 0 reads: through its own layer, then `before`, then the real files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from instep.unedited.errors import UneditedError
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.layers.layer import MISSING, Layer, is_directory, real_lstat
from instep.unedited.files.paths import (
    CURRENT,
    PathResolver,
    StrOrBytesPath,
    path_error,
    retry_if_changed,
    script_paths_in_errors,
)


class OverlayReads(PathResolver):
    """The base class of `OverlayFiles`: everything that changes nothing."""

    def __init__(self, rank_layer: Layer, before: Layer | None) -> None:
        super().__init__([layer for layer in (rank_layer, before) if layer is not None])
        self._rank_layer = rank_layer
        with suppress(FileNotFoundError):  # it has been removed
            self.open_directories.add(CURRENT, self.open_directories.path_of(CURRENT))

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
        """As `use`, only if the file belongs to an installation that this job has not changed.

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
