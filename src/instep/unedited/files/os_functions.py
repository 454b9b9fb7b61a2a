"""What answers for `open` and the functions of `os` that take a path.

Rank 0 keeps what it is about to change and goes on; the others are sent to where their own version
lies. A path that is relative to a folder's descriptor (`dir_fd=`) is turned into an absolute one.
What takes the descriptor of a file is left alone.
"""

from __future__ import annotations

import builtins
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from instep.unedited.files.bypass import bypass_overlay, is_bypassed
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files
from instep.unedited.files.whole_writes import drafted

Function = Callable[..., Any]

_mkdir = os.mkdir
_roles: list[Rank0Files | OverlayFiles] = []


def play(role: Rank0Files | OverlayFiles | None) -> None:
    """From now on, file calls of this process go through `role`; None: they are what they are."""
    _roles[:] = [] if role is None else [role]


def role() -> Rank0Files | OverlayFiles | None:
    """What `play` was given last."""
    return _roles[0] if _roles else None


def answering(*paths: object) -> Rank0Files | OverlayFiles | None:
    """Who answers for these paths; None: the original function does."""
    if not _roles or is_bypassed() or any(isinstance(path, int) for path in paths):
        return None
    return _roles[0]


@contextmanager
def named(path: Any, second: Any = None) -> Iterator[None]:
    """Errors name the paths that the script gave."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
            if second is not None:
                error.filename2 = second
        raise


# ------------------------------------------------------------------- folders by their descriptors

_RELATIVE = {"dir_fd": ("dst", "path"), "src_dir_fd": ("src",), "dst_dir_fd": ("dst",)}
"""Which parameter is relative to this one: the first that a function has."""


def _takes_folders(function: Function) -> Function:
    """A replacement which is given absolute paths for those relative to a folder's descriptor."""
    names = list(signature(function).parameters)

    @functools.wraps(function)
    def with_paths(original: Function, *args: Any, **kwargs: Any) -> Any:
        folders = {name: kwargs.pop(name) for name in _RELATIVE if kwargs.get(name) is not None}
        if not folders:
            return function(original, *args, **kwargs)
        bound = signature(function).bind(original, *args, **kwargs)
        given = [bound.arguments[name] for name in ("path", "src", "dst") if name in names]
        role = answering(*given)
        if role is None:
            return function(original, *args, **kwargs, **folders)
        with named(*given):
            for name, fd in folders.items():
                which = next(each for each in _RELATIVE[name] if each in names)
                bound.arguments[which] = _within(fd, bound.arguments[which], role)
            return function(*bound.args, **bound.kwargs)

    return with_paths


def _within(fd: int, path: Any, role: Rank0Files | OverlayFiles) -> str:
    """A path that is relative to this descriptor's folder."""
    text = os.fsdecode(path)
    if os.path.isabs(text):
        return text
    try:
        return os.path.join(role.open_folders.path_of(fd), text)
    except OSError as error:
        error.filename = path
        raise


def _steadily(
    role: OverlayFiles,
    find: Callable[[], str],
    use: Function,
    discard: Function = lambda result: None,
) -> Any:
    """`use(find())`; again, elsewhere, if rank 0 has begun to change what was found meanwhile."""
    place = ""
    while True:
        before, place = place, find()
        try:
            result = use(place)
        except OSError:
            if place == before or role.kept(place) is None:
                raise
        else:
            if place == before or role.kept(place) is None:
                return result
            discard(result)


# ------------------------------------------------------------------------ for whoever opens itself


def to_read(path: Any) -> Any:
    """Where a library that opens files by itself shall read `path`."""
    role = answering(path)
    return role.readable(path) if isinstance(role, OverlayFiles) else path


def to_write(path: Any, flags: int = os.O_CREAT | os.O_TRUNC) -> Any:
    """Where it shall write `path`. Raises what opening it with these flags would raise."""
    role = answering(path)
    if isinstance(role, Rank0Files):
        role.keep(path)
    return role.writable(path, flags) if isinstance(role, OverlayFiles) else path


def to_make(path: Any) -> Any:
    """Where it shall make `path`, which must not exist."""
    role = answering(path)
    if isinstance(role, Rank0Files):
        role.keep(path, follow=False)
    return role.new(path) if isinstance(role, OverlayFiles) else path


@contextmanager
def written_anew(path: Any) -> Iterator[Any]:
    """Where it shall write all of `path`, whose old content stays until this block has ended."""
    role = answering(path)
    if isinstance(role, Rank0Files):
        with drafted(path, role) as draft:
            yield draft
    else:
        yield to_write(path)


# ------------------------------------------------------------------------------------ opening


def open_(
    original: Function, file: Any, mode: str = "r", *args: Any, opener: Any = None, **kwargs: Any
) -> Any:
    """For `open`: whoever has an opener of his own calls os.open."""
    role = answering(file)
    given = opener or (args[5] if len(args) > 5 else None)
    if isinstance(role, Rank0Files) and not {*"wax+"}.isdisjoint(mode):
        role.keep(file)
    if isinstance(role, OverlayFiles) and given is None:
        return original(file, mode, *args[:5], opener=_opener, **kwargs)
    return original(file, mode, *args, opener=opener, **kwargs)


def numpy_opener(original: Function, self: Any, kind: Any) -> Any:
    """For numpy's table of openers, which knows `open` as it was."""
    found = original(self, kind)
    return builtins.open if kind is None else found


def _opener(path: Any, flags: int) -> int:
    return os.open(path, flags, 0o666)


_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@_takes_folders
def os_open(
    original: Function, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> Any:
    """For os.open."""
    role = answering(path)
    if isinstance(role, Rank0Files) and flags & _CHANGES:
        role.keep(path)
    if not isinstance(role, OverlayFiles):
        return original(path, flags, mode, dir_fd=dir_fd)
    with named(path):
        if not flags & _CHANGES:
            fd: int = _steadily(
                role,
                lambda: role.readable(path),
                lambda place: original(place, flags, mode),
                os.close,
            )
            role.opened(fd, path)
            return fd
        return original(role.writable(path, flags), flags | os.O_CREAT, mode)


def truncate(original: Function, path: Any, length: int) -> None:
    """For os.truncate."""
    with named(path):
        original(to_write(path, 0), length)


# ------------------------------------------------------------------------------------ looking


@_takes_folders
def look(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.stat and so on."""
    role = answering(path)
    if not isinstance(role, OverlayFiles):
        return original(path, *args, **kwargs)
    with named(path):
        follow = kwargs.get("follow_symlinks", True)
        return _steadily(
            role,
            lambda: role.place(path, follow=follow),
            lambda place: original(place, *args, **kwargs),
        )


def access(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.access, which raises nothing."""
    try:
        return look(original, path, *args, **kwargs)
    except (FileNotFoundError, NotADirectoryError):
        return False


@_takes_folders
def look_at_link(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.lstat and os.readlink."""
    role = answering(path)
    if not isinstance(role, OverlayFiles):
        return original(path, *args, **kwargs)
    with named(path):
        return _steadily(
            role,
            lambda: role.place(path, follow=False),
            lambda place: original(place, *args, **kwargs),
        )


# ----------------------------------------------------------------------------------- changing


@_takes_folders
def make(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.mkdir, os.mkfifo and os.mknod."""
    role = answering(path)
    if isinstance(role, Rank0Files):
        role.keep(path, follow=False)
    if isinstance(role, OverlayFiles):
        with named(path):
            return original(role.new(path, folder=original is _mkdir), *args, **kwargs)
    return original(path, *args, **kwargs)


@_takes_folders
def symlink(original: Function, src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.symlink."""
    role = answering(dst)
    if role is not None:
        role.forget_links()
    if isinstance(role, Rank0Files):
        role.keep(dst, follow=False)
    if isinstance(role, OverlayFiles):
        with named(src, dst):
            return original(src, role.new(dst))
    return original(src, dst, *args, **kwargs)


@_takes_folders
def link(original: Function, src: Any, dst: Any, **kwargs: Any) -> Any:
    """For os.link."""
    role = answering(src, dst)
    if role is not None:
        role.forget_links()
    if isinstance(role, Rank0Files):
        role.keep(dst, follow=False)
    if not isinstance(role, OverlayFiles):
        return original(src, dst, **kwargs)
    with named(src, dst):
        return role.link(src, dst)


@_takes_folders
def unlink(original: Function, path: Any, *, dir_fd: int | None = None) -> Any:
    """For os.unlink and os.remove."""
    role = answering(path)
    with named(path):
        if isinstance(role, OverlayFiles) and role.unlink(path):
            return None
    if isinstance(role, Rank0Files):
        role.keep(path, follow=False, unwritten=True)
        role.forget_links()
    return original(path, dir_fd=dir_fd)


@_takes_folders
def rmdir(original: Function, path: Any, *, dir_fd: int | None = None) -> Any:
    """For os.rmdir."""
    role = answering(path)
    with named(path):
        if isinstance(role, OverlayFiles) and role.rmdir(path):
            return None
    if isinstance(role, Rank0Files):
        role.keep(path, follow=False)
        role.forget_links()
    return original(path, dir_fd=dir_fd)


@_takes_folders
def rename(original: Function, src: Any, dst: Any, **kwargs: Any) -> Any:
    """For os.rename and os.replace."""
    role = answering(src, dst)
    with named(src, dst):
        if isinstance(role, OverlayFiles) and role.rename(src, dst):
            return None
    if isinstance(role, Rank0Files):
        role.keep_both(src, dst)
        role.forget_links()
    return original(src, dst, **kwargs)


@_takes_folders
def describe(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For os.chmod, os.utime and so on: what was there before keeps its mode and times."""
    role = answering(path)
    if not isinstance(role, OverlayFiles):
        return original(path, *args, **kwargs)
    with named(path):
        place = role.own(path, follow=kwargs.get("follow_symlinks", True))
        return None if place is None else original(place, *args, **kwargs)


def rmtree(
    original: Function, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any
) -> Any:
    """For shutil.rmtree: by paths, not by file descriptors."""
    role = answering(path)
    if role is None:
        return original(path, *args, dir_fd=dir_fd, **kwargs)
    if dir_fd is not None:
        with named(path):
            return rmtree(original, _within(dir_fd, path, role), *args, **kwargs)
    before = shutil._use_fd_functions  # type: ignore[attr-defined]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    try:
        return original(path, *args, **kwargs)
    finally:
        shutil._use_fd_functions = before  # type: ignore[attr-defined]


# ------------------------------------------------------------------------- where this process is


def chdir(original: Function, path: Any) -> None:
    """For os.chdir."""
    role = answering(path)
    with named(path):
        original(role.folder(path) if isinstance(role, OverlayFiles) else path)


def getcwd(original: Function) -> str:
    """For os.getcwd."""
    role = _roles[0] if _roles else None
    here: str = original()
    return role.virtual(here) if isinstance(role, OverlayFiles) else here


def getcwdb(original: Function) -> bytes:
    """For os.getcwdb."""
    return os.fsencode(os.getcwd())


# ---------------------------------------------------------------------------------- temporary


def temporary(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For tempfile's functions: in the usual folder, under a name that nobody else has."""
    folder = signature(original).bind(*args, **kwargs).arguments.get("dir")
    if not _roles or (folder is not None and os.fspath(folder) != tempfile.gettempdir()):
        return original(*args, **kwargs)
    with bypass_overlay():
        made = original(*args, **kwargs)
    path = made if isinstance(made, str) else getattr(made, "name", None) or made[1]
    if isinstance(path, str):
        _roles[0].spare(path)
    return made
