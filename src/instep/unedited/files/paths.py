"""What a process does with a path, and which file the script means by it."""

from __future__ import annotations

import errno
import functools
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from instep.process.storage import cache_folder
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.layers.layer import MISSING, Layer

P = ParamSpec("P")
T = TypeVar("T")
StrOrBytesPath = str | bytes | os.PathLike[Any]
PathMethod = Callable[Concatenate[Any, StrOrBytesPath, P], T]

CURRENT = os.curdir
"""Stands for the current directory, in place of the descriptor of an open one."""
_MAX_LINKS = 40
_TEMPORARY = 1000
"""So many of the latest temporary paths stay private when they are removed: a script may make them
anew. Older ones do if they are still there."""
_CACHES = (
    *("HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("TRITON_CACHE_DIR", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH"),
)


def private_directories() -> list[str]:
    """Where every rank reads and writes by itself: kernel interfaces, and caches that lock.

    Not caches in a home directory that does not exist: nobody but the script creates one.
    """
    home = os.path.expanduser("~")
    caches = [
        cache_folder(),
        os.path.join(home, ".triton"),
        *(os.environ[name] for name in _CACHES if os.environ.get(name)),
    ]
    if not os.path.isdir(home):
        caches = [cache for cache in caches if not cache.startswith(f"{home}/")]
    compiled = os.path.join(os.path.realpath(tempfile.gettempdir()), "torchinductor_")
    return ["/dev/", "/proc/", "/sys/", compiled, *(f"{os.path.realpath(c)}/" for c in caches)]


class PassthroughFiles:
    """What a process does with a path before it reads or changes what is there.

    This class does nothing, as without instep: the process works at the path itself. So does
    rank 0, but it keeps what is about to change. Other ranks work at other locations.
    """

    layers: Sequence[Layer] = ()
    """Those through which it reads; the first one that has an entry for a path is right."""

    def __init__(self) -> None:
        self.changed: dict[int, str] = {}
        """The latest path that each thread changed here, or was to, by the thread's identifier;
        whoever asks removes it before."""
        self.open_directories = OpenDirectories()
        self.followed: dict[str, str] = {}
        """Directories, and where they are after all links."""
        self.bound_sockets: dict[str, str] = {}
        """The paths to which the script has bound sockets, by those that the kernel has got."""

    def keep(
        self, path: StrOrBytesPath, *, follow: bool = True, never_written_again: bool = False
    ) -> None:
        """On rank 0, keep what is at a path that is about to change.

        `never_written_again`: no process will write into this file, so a hard link is a copy.
        """

    def add_temporary(self, path: str) -> None:
        """Treat this path and everything below it as private: no other rank can mean it."""

    def clear_links(self) -> None:
        """Forget which links were followed: a link, or a directory above one, has changed."""
        self.followed.clear()

    def use(
        self, path: StrOrBytesPath, function: Callable[[Any], Any], *, follow: bool = True
    ) -> Any:
        """Call `function` with the location of `path`; again if rank 0 began to change what was
        located meanwhile."""
        return function(path)

    def location_to_read(self, path: StrOrBytesPath) -> Any:
        """Where to read `path`. UneditedError if rank 0 could not keep its content."""
        return path

    def location_to_write(self, path: StrOrBytesPath, flags: int) -> Any:
        """Where to open `path` with these flags, which include writing. Raises as os.open does."""
        self.keep(path)
        return path

    def location_to_replace(self, path: StrOrBytesPath) -> AbstractContextManager[Any]:
        """Where to write all of `path`. Rank 0 leaves the old content there until the end."""
        return nullcontext(self.location_to_write(path, os.O_CREAT | os.O_TRUNC))

    def new_location(self, path: StrOrBytesPath, *, directory: bool = False) -> Any:
        """Where to make `path`, which must not exist. Raises FileExistsError and so on."""
        return path

    def own_location(self, path: StrOrBytesPath, *, follow: bool = True) -> Any:
        """The location of `path` if this rank may change its metadata; None if it is rank 0's."""
        return path

    def visible_path(self, location: str) -> str:
        """The path whose file lies at `location`."""
        for layer in self.layers:
            location = layer.visible_path(location)
        return location

    def own_directory(self) -> str | None:
        """The current directory as the script sees it; None if it is the real one."""
        return None

    def change_directory(self, path: StrOrBytesPath) -> bool:
        """Change the current directory; False if the caller is to change it itself."""
        return False

    def listdir(self, path: StrOrBytesPath) -> list[str] | None:
        """The names in a directory; None if they are those of the real one."""
        return None

    def has_changed(self, directory: StrOrBytesPath) -> bool:
        """On rank 0, whether this job has changed the entries of a directory."""
        return False

    def unlink(self, path: StrOrBytesPath) -> bool:
        """Remove a file or link; False if the caller is to remove the path itself."""
        self.keep(path, follow=False, never_written_again=True)
        self.clear_links()
        return False

    def rmdir(self, path: StrOrBytesPath) -> bool:
        """Remove an empty directory; False as above. It fails for a file: that may be written."""
        self.keep(path, follow=False)
        self.clear_links()
        return False

    def rename(self, source: StrOrBytesPath, target: StrOrBytesPath) -> bool:
        """Rename a file or a directory; False as above."""
        return False

    def link(self, source: StrOrBytesPath, target: StrOrBytesPath) -> bool:
        """Give a file another name; False as above."""
        self.clear_links()
        self.keep(target, follow=False)
        return False

    symlink = link
    """The same for a symbolic link to `source`."""

    def record_checkpoint(self, path: StrOrBytesPath) -> None:
        """Delete the oldest checkpoints of a rank other than 0 if they take too much."""


class PathResolver(PassthroughFiles):
    """The base class of `Rank0Files` and `OverlayFiles`: resolves paths through layers.

    A resolved path is absolute, and no directory on the way to its last name is a symbolic link.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = layers
        self._private = tuple(private_directories())
        self._temporary: dict[str, None] = {}
        self._next_look = 2 * _TEMPORARY

    @bypass_overlay()
    def add_temporary(self, path: str) -> None:
        self._temporary[os.path.realpath(path)] = None
        if len(self._temporary) < self._next_look:
            return
        for older in [*self._temporary][:-_TEMPORARY]:
            if not os.path.lexists(older):
                del self._temporary[older]
        self._next_look = 2 * len(self._temporary)

    def is_private(self, resolved: str) -> bool:
        """Whether every rank uses this path by itself: no file of the user, or temporary."""
        if f"{resolved}/".startswith(self._private):
            return True
        while self._temporary and len(resolved) > 1:
            if resolved in self._temporary:
                return True
            resolved = os.path.dirname(resolved)
        return False

    def temporary_in(self, text: str) -> list[str]:
        """The temporary files that occur in a text, in its order."""
        return sorted((path for path in [*self._temporary] if path in text), key=text.index)

    def resolve_parents(self, path: StrOrBytesPath) -> str:
        """The absolute path, with links followed in all names but the last one."""
        return self._resolve_parents(self.visible_path(self._absolute(os.fsdecode(path))))

    def current_directory(self) -> str:
        """The path of the current directory, which rank 0 may have removed or renamed already."""
        return self.visible_path(self.open_directories.path_of(CURRENT))

    def _absolute(self, path: str) -> str:
        try:
            directory = "" if os.path.isabs(path) else self.current_directory()
        except FileNotFoundError as error:
            error.filename = path
            raise
        return os.path.normpath(os.path.join(directory, path))

    def resolve(self, path: StrOrBytesPath) -> str:
        """The absolute path, with links followed in all names."""
        return self._follow(self.resolve_parents(path), 0)

    def find(self, resolved: str) -> str:
        """The location of a path; MISSING if it does not exist in what this rank sees."""
        flag = self.layers[0].change_flag(resolved) if self.layers else None
        if flag is not None:
            exists = os.path.lexists(resolved)
            if not self.has_flag(flag):  # looked at last: rank 0 works at the same time
                return resolved if exists else MISSING
        if self.is_private(resolved):
            return self._real_location(resolved)
        for layer in self.layers:
            location = layer.find(resolved)
            if location is not None:
                return location
        found = self._real_location(resolved)
        kept = self.find_before(resolved)
        return found if kept is None else kept

    def has_flag(self, flag: str) -> bool:
        """Whether any layer has this flag (`Layer.change_flag`)."""
        return any(layer.has_flag(flag) for layer in self.layers)

    def _real_location(self, resolved: str) -> str:
        exists = os.path.lexists(resolved) and self._parents_unchanged(resolved)
        return resolved if exists else MISSING

    @bypass_overlay()
    def find_before(self, resolved: str) -> str | None:
        """Where rank 0 has kept what was at a path; None if it has not touched the path.

        Rank 0 works at the same time, so this is asked again after the real file was looked at.
        """
        return next((p for p in (x.find(resolved) for x in self.layers[1:]) if p is not None), None)

    def _parents_unchanged(self, resolved: str) -> bool:
        """Whether no directory above the path has become a link since the job began."""
        parent = os.path.dirname(resolved)
        return not any(layer.find(parent) for layer in self.layers) or (
            os.path.realpath(parent) == parent
        )

    def _resolve_parents(self, path: str, depth: int = 0) -> str:
        directory, name = os.path.split(path)
        if not name:
            return path
        if directory not in self.followed:
            parents_resolved = self._resolve_parents(directory, depth)
            self.followed[directory] = self._follow(parents_resolved, depth)
        return os.path.join(self.followed[directory], name)

    def _follow(self, resolved: str, depth: int) -> str:
        location = self.find(resolved)
        if location == MISSING or not os.path.islink(location):
            return resolved
        if depth > _MAX_LINKS:
            raise path_error(errno.ELOOP, resolved)
        target = os.path.normpath(os.path.join(os.path.dirname(resolved), os.readlink(location)))
        if resolved.startswith("/proc/") and not os.path.lexists(target):
            return resolved  # such as /proc/self/ns/pid: the text of the link is no path
        return self._follow(self._resolve_parents(target, depth + 1), depth + 1)


def retry_if_changed(method: PathMethod[P, T]) -> PathMethod[P, T]:
    """A method of a PathResolver that is called again where it fails because rank 0 has just begun
    to change the path or the directory above. It must fail before it changes anything."""

    @functools.wraps(method)
    def again(self: Any, path: StrOrBytesPath, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: tuple[str, ...] = ()
        while True:
            try:
                return method(self, path, *args, **kwargs)
            except OSError:
                before = found
                with suppress(OSError):  # a loop of links, say
                    resolved = self.resolve_parents(path)
                    found = self.find(resolved), self.find(os.path.dirname(resolved))
                if found == before:
                    raise

    return again


class OpenDirectories:
    """The paths, as the script sees them, of the directories that this rank has open, and of the
    current one, for which CURRENT stands in place of a descriptor.

    On rank 0 the kernel knows them. Another rank may have renamed or removed a directory in its
    own layer only, and rank 0 may have renamed the real one already, so that rank records them.
    """

    def __init__(self) -> None:
        self._paths: dict[int | str, tuple[tuple[int, int], str | None]] = {}

    @bypass_overlay()
    def add(self, fd: int | str, path: str) -> None:
        """Record that `fd` is open for the directory at the absolute `path`."""
        status = os.stat(fd)
        self._paths[fd] = (status.st_dev, status.st_ino), path

    def rename(self, old: str, new: str | None) -> None:
        """Record that everything at `old` is at `new` by now; None: it was removed."""
        for fd, (identity, path) in list(self._paths.items()):
            if path is not None and f"{path}/".startswith(f"{old}/"):
                self._paths[fd] = identity, None if new is None else new + path[len(old) :]

    @bypass_overlay()
    def path_of(self, fd: int | str) -> str:
        """The directory's path. Raises what a call with `dir_fd=fd`, or os.getcwd, would raise."""
        status = os.stat(fd)
        if not stat.S_ISDIR(status.st_mode):
            raise path_error(errno.ENOTDIR)
        identity, path = self._paths.get(fd, (None, None))
        if identity != (status.st_dev, status.st_ino):
            path = _kernel_path(fd, status)
        if path is None:
            raise path_error(errno.ENOENT)
        return path


def _kernel_path(fd: int | str, status: os.stat_result) -> str | None:
    """The path that the kernel reports; None if it was removed or cannot be reached."""
    path = os.readlink("/proc/self/cwd" if fd == CURRENT else f"/proc/self/fd/{fd}")
    try:
        return path if os.path.samestat(os.stat(path), status) else None
    except OSError:
        return None


def path_error(number: int, *path: object) -> OSError:
    """The error that the operating system would raise about the path that the script gave."""
    return OSError(number, os.strerror(number), *path)


@contextmanager
def script_paths_in_errors(path: Any, second: Any = None) -> Iterator[None]:
    """Replace locations in errors by the paths that the script gave."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = _name_in_errors(path)
            if second is not None:
                error.filename2 = _name_in_errors(second)
        raise


def _name_in_errors(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path
