"""Libraries that open files by themselves, not through `open`: they are told where."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from instep.distributed.communication.rank_local import rank_local
from instep.process.patching import subclass
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.os_functions import (
    open_,
    os_open,
    role,
    to_make,
    to_read,
    to_write,
    written_anew,
)
from instep.unedited.files.overlay import OverlayFiles
from instep.unedited.files.rank0_files import Rank0Files

Function = Callable[..., Any]

_KEEP_CONTENT = os.O_CREAT


def _is_path(value: object) -> bool:
    return isinstance(value, str | bytes | os.PathLike)


def torch_save(original: Function, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """For torch.save."""
    if not _is_path(f):
        return original(obj, f, *args, **kwargs)
    with written_anew(f) as place:
        original(obj, place, *args, **kwargs)
    return _saved(f)


def _saved(path: Any) -> None:
    saver = role()
    if isinstance(saver, OverlayFiles):
        saver.saved(path)


def reads(position: int, name: str) -> Function:
    """A replacement for a function that reads the path which is this argument of its."""

    def reading(original: Function, *args: Any, **kwargs: Any) -> Any:
        path = args[position] if position < len(args) else kwargs.get(name)
        if not _is_path(path):
            return original(*args, **kwargs)
        return _with(to_read(path), position, name, original, args, kwargs)

    return reading


def writes(position: int, name: str, suffix: str = "", *, checkpoint: bool = False) -> Function:
    """The same for a path that it writes anew, and to which it adds `suffix` if that is missing."""

    def writing(original: Function, *args: Any, **kwargs: Any) -> Any:
        path = args[position] if position < len(args) else kwargs.get(name)
        if not _is_path(path):
            return original(*args, **kwargs)
        text = os.fspath(path)  # type: ignore[arg-type]
        if suffix and not text.endswith(suffix):
            text += suffix
        with written_anew(text) as place:
            result = _with(place, position, name, original, args, kwargs)
        if checkpoint:
            _saved(text)
        return result

    return writing


def _with(
    place: Any,
    position: int,
    name: str,
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if position < len(args):
        return function(*args[:position], place, *args[position + 1 :], **kwargs)
    return function(*args, **kwargs | {name: place})


def opens(original: Function, self: Any, path: Any, mode: Any = "r", *a: Any, **k: Any) -> Any:
    """For a class that opens a path with a mode, such as h5py.File."""
    if _is_path(path):
        text = mode or "r"
        flags = os.O_TRUNC | os.O_CREAT if text[0] in "wx" else _KEEP_CONTENT
        path = to_read(path) if text == "r" else to_write(path, flags)
    return original(self, path, mode, *a, **k)


def connect(original: Function, database: Any, *args: Any, **kwargs: Any) -> Any:
    """For sqlite3.connect and sqlite3.Connection."""
    is_uri = args[_URI] if len(args) > _URI else kwargs.get("uri", False)
    return original(_database(os.fsdecode(database), bool(is_uri)), *args, **kwargs)


def connection(original: type) -> type:
    """For the class sqlite3.Connection."""
    return subclass(original, connect)


_URI = 6
"""Behind the path."""


def _database(name: str, is_uri: bool) -> str:
    """Where SQLite shall look for it, its journals beside it."""
    if name in ("", ":memory:"):
        return name
    if not is_uri or not name.startswith("file:"):
        return _with_journals(name)
    said, _, query = name.partition("?")
    path = unquote(urlsplit(said).path)
    mode = parse_qs(query).get("mode", ["rwc"])[0]
    if mode == "memory" or path in ("", ":memory:"):
        return name
    place = to_read(path) if mode == "ro" else _with_journals(path)
    return f"file:{quote(os.path.abspath(place))}{'?' if query else ''}{query}"


def _with_journals(path: str) -> str:
    for journal in ("-journal", "-wal"):
        if os.path.exists(path + journal) or isinstance(role(), Rank0Files):
            to_write(path + journal, _KEEP_CONTENT)
    return str(to_write(path, _KEEP_CONTENT))


def lmdb(original: type) -> type:
    """For the class lmdb.Environment, which is lmdb.open too and has no subclasses."""

    class _Kind(type):
        def __call__(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
            return _environment(original, path, *args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    return _Kind(original.__name__, (), {"__doc__": original.__doc__})


def _environment(
    make: Function, path: Any, map_size: int = 10 << 20, subdir: bool = True, **kwargs: Any
) -> Any:
    name = os.fsdecode(path)
    data, lock = (f"{name}/data.mdb", f"{name}/lock.mdb") if subdir else (name, f"{name}-lock")
    if kwargs.get("readonly"):
        place = to_read(data)
        if isinstance(role(), OverlayFiles):
            kwargs["lock"] = False  # it would write into rank 0's file
    else:
        if subdir and kwargs.get("create", True) and not os.path.isdir(name):
            os.mkdir(name, kwargs.get("mode", 0o755))
        place, _ = to_write(data, _KEEP_CONTENT), to_write(lock, _KEEP_CONTENT)
    return make(os.path.dirname(place) if subdir else place, map_size, subdir, **kwargs)


def file_io(original: type) -> type:
    """For the class io.FileIO."""

    def begin(
        begin: Function, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None
    ) -> None:
        open_(begin, file, mode, closefd=closefd, opener=opener)

    return subclass(original, begin)


def posix_open(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For posix.open, which is os.open; Python's import system caches by it what it compiles."""
    if sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap_external":
        return original(*args, **kwargs)
    return os_open(original, *args, **kwargs)


def bind(original: Function, self: Any, address: Any) -> Any:
    """For socket.bind: on ranks other than 0, at a path that lies elsewhere."""
    if self.family != socket.AF_UNIX or not _is_path(address) or os.fsencode(address)[:1] == b"\0":
        return original(self, address)
    return _near(to_make(address), lambda place: original(self, place))


def reach(original: Function, self: Any, address: Any) -> Any:
    """For socket.connect and connect_ex."""
    if self.family != socket.AF_UNIX or not _is_path(address) or os.fsencode(address)[:1] == b"\0":
        return original(self, address)
    return _near(to_read(address), lambda place: original(self, place))


def _near(place: Any, do: Function) -> Any:
    """A socket's path may have 107 headers only: `do` it with a short name of `place`."""
    folder, name = os.path.split(os.fsdecode(place))
    if len(os.fsencode(place)) < _SOCKET_PATH:
        return do(place)
    with bypass_overlay():
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        return do(f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)


_SOCKET_PATH = 107


def from_file(original: Function, filename: Any, shared: Any = None, *a: Any, **k: Any) -> Any:
    """For torch.from_file, which maps the file itself, and changes it if it is `shared`."""
    place = to_write(filename, _KEEP_CONTENT) if shared else to_read(filename)
    return original(place, shared, *a, **k)


def torch_load(original: Function, f: Any, *args: Any, **kwargs: Any) -> Any:
    """For torch.load: only where it maps the file itself."""
    by_itself = kwargs.get("mmap") and _is_path(f)
    return original(to_read(f) if by_itself else f, *args, **kwargs)


def silent_init(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For wandb.init: on ranks other than 0, a run that is nowhere."""
    silent = {"mode": "disabled"} if isinstance(role(), OverlayFiles) else {}
    with rank_local():  # rank 0 starts processes there that the others do not
        return original(*args, **kwargs | silent)
