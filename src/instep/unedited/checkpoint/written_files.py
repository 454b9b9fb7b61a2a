"""The files that a script writes with `open` or renames: saved with an iteration, and set back.

A script that is started again opens its log anew, or goes on behind the lines of an iteration that
it is about to repeat. So the content of such a file belongs to the checkpoint. A file to which the
script appends for the first time after that is noted in the folder, with its size before.
"""

from __future__ import annotations

import gc
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from instep.process.pending_writes import DRAFT_PREFIX, opens_to_write
from instep.unedited.files.bypass import bypass_overlay, is_bypassed

LARGEST = 1 << 26
"""Bytes. Of a larger file only the size is saved, to which it is cut back; of one that was renamed,
nothing."""
_NOT_SAVED = ("/dev/", "/proc/", "/sys/")


class WrittenFiles:
    """The files that this process opens for writing, or gives a name, from now on."""

    def __init__(self, folder: Path, is_in_loop: Callable[[FrameType | None], bool]) -> None:
        """Files in `folder`, which holds the checkpoints, do not count. `is_in_loop`: whether a
        frame belongs to a training loop; what the script appends to elsewhere is not noted, since
        other jobs may share it."""
        self._is_in_loop = is_in_loop
        self._folder = f"{folder}{os.sep}"
        self._paths: dict[str, bool] = {}
        """Whether what is there was put there whole, by a rename."""
        self._saved: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._notes = folder / "appended.jsonl"
        self._checkpoint: tuple[str, int] | None = None
        """The loop and the iteration that were saved last, on the rank that notes files."""
        self._sizes: dict[str, int | None] = {}
        """Of files that were opened since then for the first time, before that; None: absent."""
        sys.addaudithook(self._hook)  # it cannot be removed

    def encode(self) -> dict[str, Any]:
        """Their content now, by path."""
        _flush()
        found = {}
        for path, is_renamed in self._paths.items():
            with suppress(OSError):
                status = os.stat(path)
                is_cut = status.st_size > LARGEST
                if not stat.S_ISREG(status.st_mode) or (is_renamed and is_cut):
                    continue
                mark = (status.st_ino, status.st_size, status.st_mtime_ns)
                if self._saved.get(path, (None,))[0] != mark:
                    self._saved[path] = (mark, _content(path, status.st_size))
                found[path] = self._saved[path][1]
        return found

    def begin_notes(self, loop: str, iteration: int) -> None:
        """This iteration of a loop is saved: note files that are appended to from now on."""
        self._checkpoint = loop, iteration
        self._sizes.clear()

    def read_notes(self, loop: str, iteration: int) -> dict[str, int | None]:
        """The files that were appended to after that iteration, and their sizes when it was
        saved; None: there was no such file."""
        found: dict[str, int | None] = {}
        with suppress(OSError, ValueError), open(self._notes, encoding="utf-8") as file:
            for line in file:
                note = json.loads(line)
                if note["loop"] == loop and note["iteration"] >= iteration:
                    found.setdefault(note["path"], note["size"])
        return found

    def restore(self, saved: Mapping[str, Any], appended: Mapping[str, int | None]) -> list[str]:
        """Set them back; returns what could not be, as sentences. `appended`: of `read_notes`."""
        _flush()
        problems = []
        for path, entry in saved.items():
            try:
                _restore_file(path, entry)
            except (OSError, ValueError) as error:
                problems.append(f"{path} is not as it was: {error}.")
            self._paths[path] = False
        for path in appended.keys() - saved.keys():
            try:
                _cut(path, appended[path])
            except FileNotFoundError:
                pass  # as it was, or gone with what was appended
            except OSError as error:
                problems.append(f"{path} is not as it was: {error}.")
        _seek_to_end(saved.keys() | appended.keys())
        return problems

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename") or is_bypassed():
            return
        path = _opened(*arguments) if event == "open" else arguments[1]
        if path is not None:
            name = os.path.abspath(os.fsdecode(path))
            if not name.startswith((self._folder, *_NOT_SAVED)) and DRAFT_PREFIX not in name:
                is_noted = event == "open" and self._checkpoint is not None
                if is_noted and self._is_in_loop(sys._getframe()):
                    self._note_append(name, is_append=bool(arguments[2] & os.O_APPEND))
                self._paths[name] = event == "os.rename"

    def _note_append(self, path: str, *, is_append: bool) -> None:
        """Called before a file is opened for writing."""
        if path not in self._paths:
            size = os.stat(path).st_size if os.path.exists(path) else None
            if is_append or size is None:
                self._sizes[path] = size
        if is_append and path in self._sizes:
            assert self._checkpoint is not None
            loop, iteration = self._checkpoint
            size = self._sizes.pop(path)
            note = {"loop": loop, "iteration": iteration, "path": path, "size": size}
            with suppress(OSError), bypass_overlay(), open(self._notes, "a") as file:
                file.write(json.dumps(note) + "\n")


def _opened(path: Any, mode: str | None, flags: int) -> Any:
    """The path of a file that is opened for writing; None of any other."""
    return path if opens_to_write(mode, flags) and not isinstance(path, int) else None


def _content(path: str, size: int) -> dict[str, Any]:
    if size > LARGEST:
        return {"size": size}
    content = bytearray(Path(path).read_bytes())
    data = torch.frombuffer(content, dtype=torch.uint8) if content else None
    return {"size": len(content), "data": data}


def _restore_file(path: str, entry: Mapping[str, Any]) -> None:
    if "data" in entry:
        content = b"" if entry["data"] is None else entry["data"].numpy().tobytes()
        with open(path, "r+b" if os.path.exists(path) else "wb") as file:
            file.truncate(0)
            file.write(content)
        return
    with open(path, "r+b") as file:
        if os.fstat(file.fileno()).st_size < entry["size"]:
            raise ValueError("it is too large for a checkpoint, and shorter than it was")
        file.truncate(entry["size"])


def _cut(path: str, size: int | None) -> None:
    """Remove what a file has beyond its size before; None: the file."""
    if size is None:
        os.remove(path)
    elif os.stat(path).st_size > size:
        os.truncate(path, size)


def _open_files() -> Iterator[io.IOBase]:
    for thing in gc.get_objects():
        with suppress(Exception):  # an object of the script's may answer with anything
            if isinstance(thing, io.IOBase) and not thing.closed and thing.writable():
                yield thing


def _flush() -> None:
    for file in _open_files():
        if file not in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                file.flush()


def _seek_to_end(paths: Any) -> None:
    """Files that the script has open go on where they end."""
    for file in _open_files():
        name = getattr(file, "name", None)
        if isinstance(name, str | bytes) and os.path.abspath(os.fsdecode(name)) in paths:
            with suppress(OSError, ValueError):
                file.seek(0, io.SEEK_END)
