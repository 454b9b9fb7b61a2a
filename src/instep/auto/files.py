"""What answers for `open` and the functions of `os` that take a path.

Rank 0 keeps what it is about to change and goes on; the others are sent to where their own version
lies. What takes a file descriptor, or a path relative to one, is left alone.
"""

from __future__ import annotations

import builtins
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from instep.auto.drafts import drafted
from instep.auto.keeper import Keeper
from instep.auto.real import is_real, real
from instep.auto.shadow import Shadow

Function = Callable[..., Any]

_mkdir = os.mkdir
_roles: list[Keeper | Shadow] = []


def play(role: Keeper | Shadow | None) -> None:
    """From now on, file calls of this process go through `role`; None: they are what they are."""
    _roles[:] = [] if role is None else [role]


def role() -> Keeper | Shadow | None:
    """What `play` was given last."""
    return _roles[0] if _roles else None


def _role(*paths: object, **options: Any) -> Keeper | Shadow | None:
    """Who answers for these paths; None: the original itself."""
    if not _roles or is_real():
        return None
    if any(isinstance(path, int) for path in paths):
        return None
    if any(options.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
        return None
    return _roles[0]


@contextmanager
def _named(path: Any, second: Any = None) -> Iterator[None]:
    """Errors name the paths that the script gave."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
            if second is not None:
                error.filename2 = second
        raise


# ------------------------------------------------------------------------ for whoever opens itself


def to_read(path: Any) -> Any:
    """Where a library that opens files by itself shall read `path`."""
    role = _role(path)
    return role.readable(path) if isinstance(role, Shadow) else path


def to_write(path: Any, flags: int = os.O_CREAT | os.O_TRUNC) -> Any:
    """Where it shall write `path`. Raises what opening it with these flags would raise."""
    role = _role(path)
    if isinstance(role, Keeper):
        role.keep(path)
    return role.writable(path, flags) if isinstance(role, Shadow) else path


def to_make(path: Any) -> Any:
    """Where it shall make `path`, which must not exist."""
    role = _role(path)
    if isinstance(role, Keeper):
        role.keep(path, follow=False)
    return role.new(path) if isinstance(role, Shadow) else path


@contextmanager
def written_anew(path: Any) -> Iterator[Any]:
    """Where it shall write all of `path`, whose old content stays until this block has ended."""
    role = _role(path)
    if isinstance(role, Keeper):
        with drafted(path, role) as draft:
            yield draft
    else:
        yield to_write(path)


# ------------------------------------------------------------------------------------ opening


def open_(
    original: Function, file: Any, mode: str = "r", *args: Any, opener: Any = None, **kwargs: Any
) -> Any:
    """For `open`: whoever has an opener of his own calls os.open."""
    role = _role(file)
    given = opener or (args[5] if len(args) > 5 else None)
    if isinstance(role, Keeper) and not {*"wax+"}.isdisjoint(mode):
        role.keep(file)
    if isinstance(role, Shadow) and given is None:
        return original(file, mode, *args[:5], opener=_opener, **kwargs)
    return original(file, mode, *args, opener=opener, **kwargs)


def numpy_opener(original: Function, self: Any, kind: Any) -> Any:
    """For numpy's table of openers, which knows `open` as it was."""
    found = original(self, kind)
    return builtins.open if kind is None else found


def _opener(path: Any, flags: int) -> int:
    return os.open(path, flags, 0o666)


_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def os_open(
    original: Function, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> Any:
    """For os.open."""
    role = _role(path, dir_fd=dir_fd)
    if isinstance(role, Keeper) and flags & _CHANGES:
        role.keep(path)
    if not isinstance(role, Shadow):
        return original(path, flags, mode, dir_fd=dir_fd)
    with _named(path):
        if not flags & _CHANGES:
            return original(role.readable(path), flags, mode)
        return original(role.writable(path, flags), flags | os.O_CREAT, mode)


def truncate(original: Function, path: Any, length: int) -> None:
    """For os.truncate."""
    with _named(path):
        original(to_write(path, 0), length)


# ------------------------------------------------------------------------------------ looking


def look(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.stat and so on."""
    role = _role(path, **kwargs)
    if not isinstance(role, Shadow):
        return original(path, *args, **kwargs)
    with _named(path):
        place = role.place(path, follow=kwargs.get("follow_symlinks", True))
        return original(place, *args, **kwargs)


def access(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.access, which raises nothing."""
    try:
        return look(original, path, *args, **kwargs)
    except (FileNotFoundError, NotADirectoryError):
        return False


def look_at_link(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.lstat and os.readlink."""
    role = _role(path, **kwargs)
    if not isinstance(role, Shadow):
        return original(path, *args, **kwargs)
    with _named(path):
        return original(role.place(path, follow=False), *args, **kwargs)


def listdir(original: Function, path: Any = ".") -> Any:
    """For os.listdir: in the same order on all ranks."""
    role = _role(path)
    if isinstance(role, Shadow):
        with _named(path):
            names = role.listed(path)
        if names is not None:
            return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names
    names = original(path)
    return sorted(names) if isinstance(role, Keeper) and role.has_changed(path) else names


class Entry(os.PathLike[str]):
    """What os.DirEntry is, for a folder that is not there as it is seen."""

    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self.path = os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As os.DirEntry has it."""
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As os.DirEntry has it."""
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        """As os.DirEntry has it."""
        return os.path.islink(self.path)

    def _mode(self, follow_symlinks: bool) -> int:
        try:
            return os.stat(self.path, follow_symlinks=follow_symlinks).st_mode
        except FileNotFoundError:
            return 0

    def is_junction(self) -> bool:
        """As os.DirEntry has it."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As os.DirEntry has it."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """As os.DirEntry has it."""
        return os.lstat(self.path).st_ino


class _Entries:
    """What os.scandir returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""


def scandir(original: Function, path: Any = ".") -> Any:
    """For os.scandir: in the same order on all ranks."""
    role = _role(path)
    folder = "." if path is None else path
    if role is None or isinstance(folder, bytes):
        return original(path)
    if isinstance(role, Shadow):
        with _named(path):
            names = role.listed(folder)
        if names is not None:
            return _Entries([Entry(os.fspath(folder), name) for name in names])
        return original(path)
    if not role.has_changed(folder):
        return original(path)
    with original(path) as entries:
        return _Entries(sorted(entries, key=lambda entry: str(entry.name)))


# ----------------------------------------------------------------------------------- changing


def make(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.mkdir, os.mkfifo and os.mknod."""
    role = _role(path, **kwargs)
    if isinstance(role, Keeper):
        role.keep(path, follow=False)
    if isinstance(role, Shadow):
        with _named(path):
            return original(role.new(path, folder=original is _mkdir), *args, **kwargs)
    return original(path, *args, **kwargs)


def symlink(original: Function, source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.symlink."""
    role = _role(target, **kwargs)
    if role is not None:
        role.forget_links()
    if isinstance(role, Keeper):
        role.keep(target, follow=False)
    if isinstance(role, Shadow):
        with _named(source, target):
            return original(source, role.new(target))
    return original(source, target, *args, **kwargs)


def link(original: Function, source: Any, target: Any, **kwargs: Any) -> Any:
    """For os.link."""
    role = _role(source, target, **kwargs)
    if role is not None:
        role.forget_links()
    if isinstance(role, Keeper):
        role.keep(target, follow=False)
    if not isinstance(role, Shadow):
        return original(source, target, **kwargs)
    with _named(source, target):
        return role.link(source, target)


def unlink(original: Function, path: Any, *, dir_fd: int | None = None) -> Any:
    """For os.unlink and os.remove."""
    role = _role(path, dir_fd=dir_fd)
    with _named(path):
        if isinstance(role, Shadow) and role.unlink(path):
            return None
    if isinstance(role, Keeper):
        role.keep(path, follow=False, unwritten=True)
        role.forget_links()
    return original(path, dir_fd=dir_fd)


def rmdir(original: Function, path: Any, *, dir_fd: int | None = None) -> Any:
    """For os.rmdir."""
    role = _role(path, dir_fd=dir_fd)
    with _named(path):
        if isinstance(role, Shadow) and role.rmdir(path):
            return None
    if isinstance(role, Keeper):
        role.keep(path, follow=False)
        role.forget_links()
    return original(path, dir_fd=dir_fd)


def rename(original: Function, source: Any, target: Any, **kwargs: Any) -> Any:
    """For os.rename and os.replace."""
    role = _role(source, target, **kwargs)
    with _named(source, target):
        if isinstance(role, Shadow) and role.rename(source, target):
            return None
    if isinstance(role, Keeper):
        role.keep_both(source, target)
        role.forget_links()
    return original(source, target, **kwargs)


def describe(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.chmod, os.utime and so on: what was there before keeps its mode and times."""
    role = _role(path, **kwargs)
    if not isinstance(role, Shadow):
        return original(path, *args, **kwargs)
    with _named(path):
        place = role.own(path, follow=kwargs.get("follow_symlinks", True))
        return None if place is None else original(place, *args, **kwargs)


def rmtree(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For shutil.rmtree: by paths, not by file descriptors."""
    before = shutil._use_fd_functions  # type: ignore[attr-defined]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    try:
        return original(*args, **kwargs)
    finally:
        shutil._use_fd_functions = before  # type: ignore[attr-defined]


# ------------------------------------------------------------------------- where this process is


def chdir(original: Function, path: Any) -> None:
    """For os.chdir."""
    role = _role(path)
    with _named(path):
        original(role.folder(path) if isinstance(role, Shadow) else path)


def getcwd(original: Function) -> str:
    """For os.getcwd."""
    role = _roles[0] if _roles else None
    here: str = original()
    return role.virtual(here) if isinstance(role, Shadow) else here


def getcwdb(original: Function) -> bytes:
    """For os.getcwdb."""
    return os.fsencode(os.getcwd())


# ---------------------------------------------------------------------------------- temporary


def temporary(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For tempfile's functions: in the usual folder, under a name that nobody else has."""
    folder = signature(original).bind(*args, **kwargs).arguments.get("dir")
    if not _roles or (folder is not None and os.fspath(folder) != tempfile.gettempdir()):
        return original(*args, **kwargs)
    with real():
        made = original(*args, **kwargs)
    path = made if isinstance(made, str) else getattr(made, "name", None) or made[1]
    if isinstance(path, str):
        _roles[0].spare(path)
    return made
