"""In the watcher: stacks that faulthandler writes when a process of the rank gets the signal.

The processes are the rank itself, while C code holds its interpreter's lock, and its loader workers
that were forked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from instep.distributed.watchdog.event_loop import EventLoop
from instep.process import PACKAGE_FOLDER, is_stdlib
from instep.process.procfs import handles_signal

_POLL_SECONDS, _POLLS = 0.05, 10
"""Until a process has written its stacks, or does not write any."""
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class StackDumps:
    """Asks one process after the other, because all of them write into one file."""

    def __init__(self, loop: EventLoop, file: int | None, signal_number: int) -> None:
        self._loop, self._file, self._signal = loop, file, signal_number
        self._queue: list[tuple[Sequence[int], Callable[[dict[int, str]], None]]] = []

    def can_dump(self, pid: int) -> bool:
        """Whether a process handles the signal; any other would end by it."""
        return self._file is not None and handles_signal(pid, self._signal)

    def collect(self, pids: Sequence[int], done: Callable[[dict[int, str]], None]) -> None:
        """Call `done` with the stacks of those of the processes that write them."""
        self._queue.append(([pid for pid in pids if self.can_dump(pid)], done))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        pids, _ = self._queue[0]
        self._ask(list(pids), {})

    def _ask(self, left: list[int], found: dict[int, str]) -> None:
        if not left:
            _, done = self._queue.pop(0)
            if self._queue:
                self._loop.call_later(0, self._begin)
            done(found)
            return
        pid, *others = left
        assert self._file is not None
        os.ftruncate(self._file, 0)
        if self.can_dump(pid):
            with suppress(OSError):
                os.kill(pid, self._signal)
        self._wait(pid, others, found, 0, 0)

    def _wait(
        self, pid: int, others: list[int], found: dict[int, str], size: int, polls: int
    ) -> None:
        assert self._file is not None
        now = os.fstat(self._file).st_size
        if (now and now == size) or polls == _POLLS:
            if now:
                found[pid] = os.pread(self._file, now, 0).decode(errors="replace")
            self._ask(others, found)
        else:
            self._loop.call_later(
                _POLL_SECONDS, lambda: self._wait(pid, others, found, now, polls + 1)
            )


def script_position(dump: str) -> str:
    """The line of the user's code at which the thread is that got the signal; else its innermost.

    Empty where the dump has no frame.
    """
    current = dump.rpartition("Current thread ")[2]
    frames = _FRAME.findall(current)
    for file, line, _ in frames:
        if not _is_library(file):
            return f"{file}:{line}"
    return ":".join(frames[0][:2]) if frames else ""


def is_idle_worker(dump: str) -> bool:
    """Whether a loader worker waits for its next task."""
    frames = _FRAME.findall(dump.rpartition("Current thread ")[2])
    own = next((name for file, _, name in frames if "/torch/utils/data/" in file), "")
    return own == "_worker_loop"


def _is_library(file: str) -> bool:
    return file.startswith(PACKAGE_FOLDER) or "/torch/" in file or is_stdlib(file)
