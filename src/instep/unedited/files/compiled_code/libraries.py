"""The replacements of functions of libraries that open files themselves, not with `open`."""

from __future__ import annotations

import builtins
import os
import sys
import tempfile
from collections.abc import Callable
from inspect import signature
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from instep.distributed.communication.rank_local import rank_local
from instep.process.patching import Function, subclass
from instep.unedited.files.bypass import bypass_overlay
from instep.unedited.files.os_functions import (
    current_files,
    files_for,
    open_,
    os_open,
    path_to_read,
    path_to_write,
)

_KEEP_CONTENT = os.O_CREAT


def _is_path(value: object) -> bool:
    return isinstance(value, str | bytes | os.PathLike)


def torch_save(original: Function, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """For torch.save."""
    if not _is_path(f):
        return original(obj, f, *args, **kwargs)
    from instep.distributed.flight_record.recorder import phase  # torch is imported by now

    with phase("checkpoint"), files_for(f).location_to_replace(f) as location:
        original(obj, location, *args, **kwargs)
    current_files().record_checkpoint(f)
    return None


def reads_path(name: str) -> Function:
    """A replacement of a function that reads the path given as its first argument."""
    return _with_path(0, name, lambda path, call: call(path_to_read(path)))


def writes_path(
    position: int, name: str, suffix: str = "", *, checkpoint: bool = False
) -> Function:
    """A replacement of a function that replaces the path given as this argument, to which it adds
    `suffix` if that is missing."""

    def write(path: Any, call: Function) -> Any:
        text = os.fspath(path)
        if suffix and not text.endswith(suffix):
            text += suffix
        with files_for(text).location_to_replace(text) as location:
            result = call(location)
        if checkpoint:
            current_files().record_checkpoint(text)
        return result

    return _with_path(position, name, write)


def _with_path(position: int, name: str, use: Callable[[Any, Function], Any]) -> Function:
    """A replacement that calls `use(path, call)` if this argument is a path; `call(location)` calls
    the original with another one in its place."""

    def answer(original: Function, *args: Any, **kwargs: Any) -> Any:
        path = args[position] if position < len(args) else kwargs.get(name)
        if not _is_path(path):
            return original(*args, **kwargs)

        def call(location: Any) -> Any:
            if position < len(args):
                return original(*args[:position], location, *args[position + 1 :], **kwargs)
            return original(*args, **kwargs | {name: location})

        return use(path, call)

    return answer


def file_init(name: str) -> Function:
    """A replacement of the __init__ of a class that opens a path with a mode, such as h5py.File.

    `name` is that of the parameter for the path.
    """

    def init(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        def open_at(path: Any, call: Function) -> Any:
            mode = (args[1] if len(args) > 1 else kwargs.get("mode")) or "r"
            flags = os.O_TRUNC | os.O_CREAT if mode[0] in "wx" else _KEEP_CONTENT
            return call(path_to_read(path) if mode == "r" else path_to_write(path, flags))

        return _with_path(1, name, open_at)(original, self, *args, **kwargs)

    return init


def sqlite_connect(original: Function, database: Any, *args: Any, **kwargs: Any) -> Any:
    """For sqlite3.connect and the __init__ of sqlite3.Connection."""
    is_uri = args[_URI] if len(args) > _URI else kwargs.get("uri", False)
    return original(_sqlite_location(os.fsdecode(database), bool(is_uri)), *args, **kwargs)


def sqlite_connection(original: type) -> type:
    """For the class sqlite3.Connection."""
    return subclass(original, sqlite_connect)


_URI = 6
"""The position of this argument, after the path."""


def _sqlite_location(name: str, is_uri: bool) -> str:
    """The location of a database, whose journals SQLite makes beside it."""
    if name in ("", ":memory:"):
        return name
    if not is_uri or not name.startswith("file:"):
        return _or_missing(_write_with_journals, name)
    uri, _, query = name.partition("?")
    path = unquote(urlsplit(uri).path)
    mode = parse_qs(query).get("mode", ["rwc"])[0]
    if mode == "memory" or path in ("", ":memory:"):
        return name
    location = _or_missing(path_to_read if mode == "ro" else _write_with_journals, path)
    return f"file:{quote(os.path.abspath(location))}{'?' if query else ''}{query}"


def _or_missing(locate: Callable[[str], str], path: str) -> str:
    """The location of a database; if there can be none, one for which SQLite raises its error."""
    try:
        return locate(path)
    except (FileNotFoundError, NotADirectoryError):
        return os.path.join(os.devnull, "missing")


def _write_with_journals(path: str) -> str:
    for journal in ("-journal", "-wal"):
        if os.path.exists(path + journal) or not current_files().layers:
            path_to_write(path + journal, _KEEP_CONTENT)
    return str(path_to_write(path, _KEEP_CONTENT))


def database_environment(original: type) -> type:
    """For the class lmdb.Environment, which is lmdb.open too and cannot be subclassed."""

    class _Metaclass(type):
        def __call__(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
            return _open_environment(original, path, *args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    return _Metaclass(original.__name__, (), {"__doc__": original.__doc__})


def _open_environment(
    make: Function, path: Any, map_size: int = 10 << 20, subdir: bool = True, **kwargs: Any
) -> Any:
    name = os.fsdecode(path)
    data, lock = (f"{name}/data.mdb", f"{name}/lock.mdb") if subdir else (name, f"{name}-lock")
    if kwargs.get("readonly"):
        location = path_to_read(data)
        if current_files().layers:
            kwargs["lock"] = False  # it would write into rank 0's file
    else:
        if subdir and kwargs.get("create", True) and not os.path.isdir(name):
            os.mkdir(name, kwargs.get("mode", 0o755))
        location, _ = path_to_write(data, _KEEP_CONTENT), path_to_write(lock, _KEEP_CONTENT)
    return make(os.path.dirname(location) if subdir else location, map_size, subdir, **kwargs)


def file_io(original: type) -> type:
    """For the class io.FileIO."""

    def init(
        init: Function, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None
    ) -> None:
        open_(init, file, mode, closefd=closefd, opener=opener)

    return subclass(original, init)


def posix_open(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For posix.open, with which Python's import system caches the bytecode that it compiles."""
    if sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap_external":
        return original(*args, **kwargs)
    return os_open(original, *args, **kwargs)


def torch_from_file(
    original: Function, filename: Any, shared: Any = None, *a: Any, **k: Any
) -> Any:
    """For torch.from_file, which maps the file itself, and changes it if it is `shared`."""
    location = path_to_write(filename, _KEEP_CONTENT) if shared else path_to_read(filename)
    return original(location, shared, *a, **k)


def torch_load(original: Function, f: Any, *args: Any, **kwargs: Any) -> Any:
    """For torch.load, which opens the file itself if it maps it."""
    maps = kwargs.get("mmap") and _is_path(f)
    return original(path_to_read(f) if maps else f, *args, **kwargs)


def init_run(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For wandb.init: on ranks other than 0, a disabled run."""
    disabled = {"mode": "disabled"} if current_files().layers else {}
    with rank_local():  # rank 0 starts processes there that the others do not start
        return original(*args, **kwargs | disabled)


def numpy_opener(original: Function, self: Any, key: Any) -> Any:
    """For numpy's table of openers by file extensions, which holds the original `open`."""
    found = original(self, key)
    return builtins.open if key is None else found


def make_temporary(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For the functions of tempfile: make a real file in the usual directory, private to a rank."""
    directory = signature(original).bind(*args, **kwargs).arguments.get("dir")
    if directory is not None and os.fspath(directory) != tempfile.gettempdir():
        return original(*args, **kwargs)
    with bypass_overlay():
        made = original(*args, **kwargs)
    path = made if isinstance(made, str) else getattr(made, "name", None) or made[1]
    if isinstance(path, str):
        current_files().add_temporary(path)
    return made
