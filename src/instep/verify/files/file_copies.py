"""Copies of files from before they are changed, and how they are put back."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from instep.errors import VerificationError
from instep.unedited.files.layers.layer import copy, is_directory
from instep.unedited.files.paths import private_directories


class FileCopies:
    """Keeps what was at each path that is about to change.

    Paths are absolute, and no directory on the way to the last name is a symbolic link. Devices,
    sockets and pipes are not kept, nor are caches and the temporary files of instep.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` receives the copies, in a new folder `kept`; its own files are not copied."""
        self._folder = folder / "kept"
        self._folder.mkdir()
        self._kept: dict[str, os.stat_result | None] = {}
        self._copies: dict[str, str] = {}
        self._left_out = (
            *private_directories(),
            f"{os.path.expanduser('~')}/.nv/",
            os.path.join(os.path.realpath(tempfile.gettempdir()), "instep-"),
            f"{os.path.realpath(folder)}/",
        )

    def keep(self, path: str) -> None:
        """Keep what is at `path`, or that nothing is. Raises OSError if it cannot be copied."""
        if path in self._kept or self._is_left_out(path):
            return
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            self._kept[path] = None
            return
        except OSError:  # no directory above: the call fails as well
            return
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            target = str(self._folder / str(len(self._copies)))
            try:
                copy(path, target)
            except OSError:
                with suppress(FileNotFoundError):
                    os.unlink(target)
                raise
            self._copies[path] = target
        elif not stat.S_ISDIR(status.st_mode):
            return
        self._kept[path] = status

    def keep_rename(self, source: str, target: str) -> None:
        """Keep what is at both paths and below them. Raises OSError as `keep` does."""
        self.keep(source)
        self.keep(target)
        if is_directory(source):
            for name in os.listdir(source):
                self.keep_rename(os.path.join(source, name), os.path.join(target, name))

    def restore(self) -> None:
        """Put everything back, remove what is new, and delete the copies.

        Raises VerificationError if a file cannot be put back. The copies are then in a new folder.
        """
        for path in sorted(self._kept, reverse=True):  # what is in a directory before itself
            if self._kept[path] is None:
                with suppress(OSError):  # it has gone, or something in it is not of this run
                    (os.rmdir if is_directory(path) else os.unlink)(path)
        directories = []
        for path, before in sorted(self._kept.items()):
            now = _status(path)
            if before is None or (now and _identity(now) == _identity(before)):
                continue
            try:
                if stat.S_ISDIR(before.st_mode):
                    _make_directory(path)
                    directories.append((path, before))
                else:
                    self._put_back(path, before)
            except OSError as error:
                raise self._failure(path, error) from error
        for path, before in reversed(directories):
            _set_metadata(path, before)
        shutil.rmtree(self._folder)

    def _put_back(self, path: str, before: os.stat_result) -> None:
        kept = self._copies[path]
        if is_directory(path):
            os.rmdir(path)
        now = _status(path)
        if (
            now and stat.S_ISREG(now.st_mode) and os.path.samestat(now, before)
        ):  # other names of the file get its content too
            with suppress(PermissionError):
                os.chmod(path, stat.S_IMODE(before.st_mode) | stat.S_IWUSR)
            with open(kept, "rb") as source, open(path, "r+b") as target:
                shutil.copyfileobj(source, target)
                target.truncate()
            shutil.copystat(kept, path)
            _set_metadata(path, before)
            return
        draft = f"{path}.instep-{os.getpid()}"
        copy(kept, draft)
        _set_metadata(draft, before)
        os.replace(draft, path)

    def _failure(self, path: str, error: OSError) -> VerificationError:
        safe = tempfile.mkdtemp(prefix="kept-by-instep-verify-")
        names = {path: os.path.basename(kept) for path, kept in self._copies.items()}
        shutil.copytree(self._folder, safe, symlinks=True, dirs_exist_ok=True)
        Path(safe, "names.txt").write_text("".join(f"{n} {p}\n" for p, n in names.items()))
        return VerificationError(
            f"a run of the script has changed {path}, and it could not be put back: {error}. "
            f"What was in it and other files is in {safe}; names.txt there says which is which."
        )

    def _is_left_out(self, path: str) -> bool:
        return f"{path}/".startswith(self._left_out) or "/__pycache__" in path


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What no change of a file leaves as it is; of a directory, what is its own."""
    own = (status.st_dev, status.st_ino, status.st_mode, status.st_uid, status.st_gid)
    if stat.S_ISDIR(status.st_mode):
        return own
    return (*own, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _make_directory(path: str) -> None:
    if os.path.lexists(path) and not is_directory(path):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)


def _set_metadata(path: str, before: os.stat_result) -> None:
    """Owner, mode and times, as far as this process may set them."""
    with suppress(PermissionError):
        os.chown(path, before.st_uid, before.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(before.st_mode):
        os.chmod(path, stat.S_IMODE(before.st_mode))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns), follow_symlinks=False)
