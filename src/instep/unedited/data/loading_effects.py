"""What loading samples changes beside their values: files, numbers that the data set keeps, and
what is printed.

A rank that has not loaded a sample lacks what loading it would have changed.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch.utils.data import Subset, get_worker_info

from instep.process.patching import Function
from instep.unedited.files.os_functions import current_files
from instep.unedited.objects.referents import referents, walk
from instep.unedited.objects.script_code import is_of_script
from instep.unedited.sharded_call.compare.side_effects import replaced_in_streams, watched_writes

_PLAIN = (bool, int, float, str)
_MAX_OBJECTS, _MAX_ENTRIES = 64, 16
"""What is looked at before and after the rows of each batch; and of a list or dict."""


class LoadingEffects:
    """Sees what is changed from now on until `describe`, by this thread and by threads that begin
    meanwhile. What others write, as TensorBoard's does, is none of the samples'."""

    def __init__(self, dataset: object) -> None:
        while type(dataset) is Subset:
            dataset = dataset.dataset
        self._dataset = dataset
        self._files = current_files()
        self._others = {thread.ident for thread in threading.enumerate()} - {get_ident()}
        for thread in {*list(self._files.changed)} - self._others:
            self._files.changed.pop(thread, None)
        self._before = self._state()
        self.prints = False
        """Whether anything was printed in `watching_prints`."""

    def describe(self) -> str:
        """A predicate about loading samples; empty if nothing was changed."""
        for thread, path in list(self._files.changed.items()):
            if path and thread not in self._others:
                return f"writes files ({os.path.basename(path)})"
        for path, value in self._state().items():
            before = self._before.get(path, getattr(type(self._dataset), path[1:], None))
            if type(before) is type(value) and before != value:
                return f"changes {type(self._dataset).__name__}{path}"
        return ""

    @contextmanager
    def watching_prints(self) -> Iterator[None]:
        """Inside, see whether this thread prints anything. A warning is no print: one is shown."""
        thread = get_ident()

        def note(write: Function, text: Any, is_warning: bool) -> bool:
            self.prints |= not is_warning and get_ident() == thread
            return False

        with watched_writes(note):
            yield

    def _state(self) -> Mapping[str, Any]:
        """Numbers and texts of the data set and of the objects that it holds, and how far its files
        are written. In a worker none: the script does not see them there."""
        state: dict[str, Any] = {}
        if get_worker_info() is not None:
            return state

        def follow(path: str, value: Any) -> Iterator[tuple[str, Any]]:
            if not path or isinstance(value, list | tuple | dict) or is_of_script(type(value)):
                for key, entry in referents(value, _MAX_ENTRIES):
                    if type(entry) in _PLAIN:
                        state[path + key] = entry
                    else:
                        yield path + key, entry

        for path, value in walk([("", self._dataset)], follow, _MAX_OBJECTS):
            if isinstance(value, io.TextIOWrapper | io.BufferedWriter):
                state[path] = _position(value)
        return state


@contextmanager
def buffered_prints() -> Iterator[Callable[[], None]]:
    """Inside, what this thread prints is held back, until the function that is given is called, a
    stream is flushed (by a debugger that asks for a command, say) or an exception is raised."""
    held: list[tuple[Function, Any]] = []
    thread = get_ident()

    def hold(write: Function, text: Any, is_warning: bool) -> bool:
        is_held = not is_warning and get_ident() == thread
        if is_held:
            held.append((write, text))
        return is_held

    def release() -> None:
        texts = held[:]
        held.clear()
        for write, text in texts:
            write(text)

    def flushing(flush: Function) -> Function:
        def flush_all() -> None:
            release()
            flush()

        return flush_all

    with watched_writes(hold), replaced_in_streams("flush", flushing):
        try:
            yield release
        except BaseException:
            release()
            raise


def _position(file: io.TextIOWrapper | io.BufferedWriter) -> int | None:
    """How far it is written, if that is known."""
    try:
        return file.tell() if file.writable() and file.seekable() else None
    except (OSError, ValueError):  # it is being read, or closed
        return None
