"""Libraries that open files by themselves, not through `open`: they are told where."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from instep.auto.files import role, to_read, to_write
from instep.auto.shadow import Shadow
from instep.communication.apart import apart

Function = Callable[..., Any]

_KEEP_CONTENT = os.O_CREAT


def _is_path(value: object) -> bool:
    return isinstance(value, str | bytes | os.PathLike)


def torch_save(original: Function, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """For torch.save."""
    if not _is_path(f):
        return original(obj, f, *args, **kwargs)
    original(obj, to_write(f), *args, **kwargs)
    saver = role()
    return saver.saved(f) if isinstance(saver, Shadow) else None


def read_first(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For a function whose first argument is the path (or something else) that it reads."""
    return original(to_read(path) if _is_path(path) else path, *args, **kwargs)


def write_first(original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    """For a function whose first argument is the path (or something else) that it writes anew."""
    return original(to_write(path) if _is_path(path) else path, *args, **kwargs)


def write_second(original: Function, what: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    """The same for the second argument."""
    return original(what, to_write(path) if _is_path(path) else path, *args, **kwargs)


def opens(original: Function, self: Any, path: Any, mode: Any = "r", *a: Any, **k: Any) -> Any:
    """For a class that opens a path with a mode, such as h5py.File."""
    if _is_path(path):
        text = mode or "r"
        flags = os.O_TRUNC | os.O_CREAT if text[0] in "wx" else _KEEP_CONTENT
        path = to_read(path) if text == "r" else to_write(path, flags)
    return original(self, path, mode, *a, **k)


def connect(original: Function, database: Any, *args: Any, **kwargs: Any) -> Any:
    """For sqlite3.connect."""
    in_memory = database in ("", b"") or os.fsdecode(database).startswith((":memory:", "file:"))
    return original(database if in_memory else to_write(database, _KEEP_CONTENT), *args, **kwargs)


def torch_load(original: Function, f: Any, *args: Any, **kwargs: Any) -> Any:
    """For torch.load: only where it maps the file itself."""
    by_itself = kwargs.get("mmap") and _is_path(f)
    return original(to_read(f) if by_itself else f, *args, **kwargs)


def silent_init(original: Function, *args: Any, **kwargs: Any) -> Any:
    """For wandb.init: on ranks other than 0, a run that is nowhere."""
    silent = {"mode": "disabled"} if isinstance(role(), Shadow) else {}
    with apart():  # rank 0 starts processes there that the others do not
        return original(*args, **kwargs | silent)
