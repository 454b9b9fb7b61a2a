"""What loading samples changes beside their values: files, numbers that the data set keeps, and
what is printed.

A rank that has not loaded a sample lacks what loading it would have changed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from instep.process.patching import Function
from instep.unedited.data.dataset_state import DatasetState
from instep.unedited.files.os_functions import current_files
from instep.unedited.sharded_call.compare.side_effects import replaced_in_streams, watched_writes


class LoadingEffects:
    """Sees what is changed from now on until `describe`, by this thread and by threads that begin
    meanwhile. What others write, as TensorBoard's does, is none of the samples'."""

    def __init__(self, state: DatasetState | None) -> None:
        self.state = state
        """What the data set held before; None in a worker, where the script does not see it."""
        self._files = current_files()
        self._others = {thread.ident for thread in threading.enumerate()} - {get_ident()}
        for thread in {*list(self._files.changed)} - self._others:
            self._files.changed.pop(thread, None)
        self.prints = False
        """Whether anything was printed in `watching_prints`."""

    def describe(self, *, draws: bool) -> tuple[str, bool]:
        """A predicate about loading samples, empty if nothing was changed; and whether it can be
        taken back. `draws`: whether they draw random numbers."""
        for thread, path in list(self._files.changed.items()):
            if path and thread not in self._others:
                return f"writes files ({os.path.basename(path)})", False
        if self.state is None:
            return "", True
        path, is_restorable = self.state.find_change(draws=draws)
        return (f"changes {path}" if path else ""), is_restorable

    @contextmanager
    def watching_prints(self) -> Iterator[None]:
        """Inside, see whether this thread prints anything. A warning is no print: one is shown."""
        thread = get_ident()

        def note(write: Function, text: Any, is_warning: bool) -> bool:
            self.prints |= not is_warning and get_ident() == thread
            return False

        with watched_writes(note):
            yield


@contextmanager
def buffered_prints() -> Iterator[Callable[[], bool]]:
    """Inside, what this thread prints is held back, until the function that is given is called, a
    stream is flushed (by a debugger that asks for a command, say) or an exception is raised. The
    function returns whether anything was held back."""
    held: list[tuple[Function, Any]] = []
    thread = get_ident()

    def hold(write: Function, text: Any, is_warning: bool) -> bool:
        is_held = not is_warning and get_ident() == thread
        if is_held:
            held.append((write, text))
        return is_held

    def release() -> bool:
        texts = held[:]
        held.clear()
        for write, text in texts:
            write(text)
        return bool(texts)

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
