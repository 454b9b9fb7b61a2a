"""Libraries that open files by themselves, not through `open`: they are told where."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from instep.auto.files import role, to_read, to_write, written_anew
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
    with written_anew(f) as place:
        original(obj, place, *args, **kwargs)
    saver = role()
    return saver.saved(f) if isinstance(saver, Shadow) else None


def reads(position: int, name: str) -> Function:
    """A replacement for a function that reads the path which is this argument of its."""

    def reading(original: Function, *args: Any, **kwargs: Any) -> Any:
        path = args[position] if position < len(args) else kwargs.get(name)
        if not _is_path(path):
            return original(*args, **kwargs)
        return _with(to_read(path), position, name, original, args, kwargs)

    return reading


def writes(position: int, name: str, suffix: str = "") -> Function:
    """The same for a path that it writes anew, and to which it adds `suffix` if that is missing."""

    def writing(original: Function, *args: Any, **kwargs: Any) -> Any:
        path = args[position] if position < len(args) else kwargs.get(name)
        if not _is_path(path):
            return original(*args, **kwargs)
        text = os.fspath(path)  # type: ignore[arg-type]
        if suffix and not text.endswith(suffix):
            text += suffix
        with written_anew(text) as place:
            return _with(place, position, name, original, args, kwargs)

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
