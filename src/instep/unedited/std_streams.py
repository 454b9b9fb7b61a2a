"""The standard streams of a rank: rank 0 has them, and the other ranks see what rank 0 sees."""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import dropwhile
from types import FrameType
from typing import Any, TypeVar

from instep.distributed.communication.rank_local import is_thread_rank_local
from instep.process import PACKAGE_FOLDER, frames_from, write_text
from instep.process.patching import Function, patches
from instep.process.process_value import ProcessValue
from instep.unedited.rank0_relay import Relay
from instep.unedited.sharded_call.compare.side_effects import PendingWarning, defer_warning

T = TypeVar("T")
_os_read = os.read
_MAX_WARNINGS = 1000
"""Of more different ones, or of one that is shown more often, rank 0 shows its own."""
_WAIT_SECONDS, _FEW = 0.25, 16
"""Seconds that a rank other than 0 waits whether rank 0 warns of the same, with the first few."""
_WARNINGS = frozenset({"warnings", "_py_warnings"})
"""The modules of Python that warn; the second from 3.14 on."""


@dataclass(frozen=True)
class Terminal:
    """Which of rank 0's streams are terminals."""

    is_terminal: tuple[bool, ...]
    """For stdin, stdout and stderr."""
    sizes: tuple[tuple[int, int] | None, ...]
    """The columns and lines of each; None if it has none."""

    @classmethod
    def detect(cls) -> Terminal:
        """The terminals of this process."""
        return cls(tuple(map(os.isatty, range(3))), tuple(map(_size, range(3))))


def _size(fd: int) -> tuple[int, int] | None:
    try:
        return tuple(os.get_terminal_size(fd))  # type: ignore[return-value]
    except OSError:
        return None


class StdStreams:
    """The standard streams of this rank, replaced from `install` to `restore`."""

    def __init__(self, rank: int, terminal: Terminal, relay: Relay) -> None:
        self.terminal = terminal
        self._rank = rank
        self._relay = relay
        self._saved: list[int] = []
        self._stdin = sys.stdin
        self.process = os.getpid()
        self._warnings: Counter[str] = Counter()

    def install(self) -> None:
        """Let rank 0 share what it reads, and silence the other ranks."""
        _current.value = self
        if self._rank != 0:
            self._silence()
        if self._stdin is not None:
            sys.stdin = io.TextIOWrapper(
                io.BufferedReader(_Rank0Stdin(self)),
                encoding=self._stdin.encoding,
                errors=self._stdin.errors,
                line_buffering=bool(self._stdin.line_buffering),
            )
            self._replace_isatty(sys.stdin, 0)

    def run_on_rank0(self, name: str, function: Callable[[], T], default: T) -> T:
        """The value of `function()` on rank 0; `default` if this rank alone may be calling."""
        if self._relay.is_ordered():
            return self._relay.run_on_rank0(name, function)
        return function() if self._rank == 0 else default

    def print_error_line(self, line: str) -> None:
        """Print a line where the job's errors go, on any rank."""
        _flush()
        write_text(self._saved[2] if self._saved else 2, f"{line}\n")

    def show_warning(self, text: str, show_as_usual: Callable[[], None]) -> None:
        """Show a warning of work that each rank does for its own rows: once, whoever warns."""
        count = self._warnings[text] + 1
        is_own = self._rank == 0
        if max(count, len(self._warnings)) <= _MAX_WARNINGS:
            self._warnings[text] = count
            digest = blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
            seconds = _WAIT_SECONDS if count == 1 and len(self._warnings) <= _FEW else 0
            is_own = self._relay.is_first(f"{digest}.{count}", seconds)
        if is_own and self._rank == 0:
            show_as_usual()
        elif is_own:
            self.print_error_line(text.removesuffix("\n"))

    def restore(self) -> None:
        """Restore the streams. What sys.stdin has read ahead is lost."""
        _current.value = None
        sys.stdin = self._stdin
        if self._saved:
            _flush()
            for fd, saved in enumerate(self._saved):
                os.dup2(saved, fd)
                os.close(saved)
            self._saved.clear()
            for stream in (sys.__stdout__, sys.__stderr__):
                if stream is not None:  # it was closed when Python started
                    vars(stream).pop("isatty", None)

    def discard_output(self) -> None:
        """Ranks other than rank 0 stay silent after `restore`, too."""
        for saved in self._saved:
            os.close(saved)
        self._saved.clear()

    def _silence(self) -> None:
        _flush()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            self._saved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
            os.dup2(null, fd)
        os.close(null)
        for fd, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
            self._replace_isatty(stream, fd)

    def _replace_isatty(self, stream: Any, fd: int) -> None:
        if stream is not None:
            stream.isatty = lambda: self.terminal.is_terminal[fd]


_current = ProcessValue[StdStreams | None](None)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


class _Rank0Stdin(io.RawIOBase):
    """File descriptor 0 of rank 0, on every rank."""

    name = "<stdin>"

    def __init__(self, streams: StdStreams) -> None:
        self._streams = streams

    def readable(self) -> bool:
        """As in io.RawIOBase."""
        return True

    def fileno(self) -> int:
        """The descriptor on rank 0."""
        return 0

    def readinto(self, buffer: Any) -> int:
        """As in io.RawIOBase."""
        count = len(buffer)
        data = self._streams.run_on_rank0("standard input", lambda: _os_read(0, count), b"")
        buffer[: len(data)] = data
        return len(data)


def input_(original: Function, prompt: object = "") -> Any:
    """For `input`, which does not read sys.stdin at a terminal."""
    streams = _current.value
    if streams is None or not streams.terminal.is_terminal[0]:
        return original(prompt)
    line = streams.run_on_rank0("input()", lambda: original(prompt), None)
    if line is None:
        raise EOFError("EOF when reading a line")
    return line


def read(original: Function, fd: int, length: int) -> Any:
    """For os.read."""
    if _current.value is None or fd != 0:
        return original(fd, length)
    return _current.value.run_on_rank0("standard input", lambda: original(fd, length), b"")


def isatty(original: Function, fd: int) -> Any:
    """For os.isatty."""
    if _current.value is None or fd not in range(3):
        return original(fd)
    return _current.value.terminal.is_terminal[fd]


def get_terminal_size(original: Function, fd: int = 1) -> Any:
    """For os.get_terminal_size."""
    streams = _current.value
    size = None if streams is None or fd not in range(3) else streams.terminal.sizes[fd]
    return original(fd) if size is None else os.terminal_size(size)


def show_warning(
    original: Function,
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """For warnings.showwarning: what is about the rows of one rank is shown by that rank. Where the
    line is one of instep's, it is the one that Python would have named without instep."""
    registry = _registry_of(filename)
    key = str(message), category, lineno
    filename, lineno = _place_without_own(filename, lineno)
    streams = _current.value if is_thread_rank_local() and file is None else None
    show_as_usual = partial(original, message, category, filename, lineno, file, line)
    if streams is None or streams.process != os.getpid():
        show_as_usual()
        return
    text = warnings.formatwarning(message, category, filename, lineno, line)
    show = partial(streams.show_warning, text, show_as_usual)
    warning = PendingWarning(show, registry, key)
    if not defer_warning(warning):
        warning.show()


def _registry_of(filename: str) -> dict[Any, Any]:
    """Where Python has noted a warning of this file that is being shown."""
    frames = (each for each in frames_from(sys._getframe(1)) if _file(each) == filename)
    return next((each.f_globals.get("__warningregistry__", {}) for each in frames), {})


def _place_without_own(filename: str, lineno: int) -> tuple[str, int]:
    """The place of a warning that is being shown, as many callers outward (its `stacklevel`)
    without instep's own; what was given where that is not instep's."""
    if not filename.startswith(PACKAGE_FOLDER):
        return filename, lineno
    shown = dropwhile(lambda each: not _is_in_warnings(each), frames_from(sys._getframe(1)))
    callers = list(dropwhile(_is_in_warnings, shown))
    places = [(_file(each), each.f_lineno) for each in callers]
    others = [place for place in places if not place[0].startswith(PACKAGE_FOLDER)]
    if (filename, lineno) not in places or not others:
        return filename, lineno
    return others[min(places.index((filename, lineno)), len(others) - 1)]


def _is_in_warnings(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _WARNINGS


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


STREAM_PATCHES = patches(
    "rank 0 has the standard streams and the terminal of all ranks",
    (builtins, "input", input_),
    (os, "read", read),
    (os, "isatty", isatty),
    (os, "get_terminal_size", get_terminal_size),
)

WARNING_PATCHES = patches(
    "a warning may be about the rows of one rank, which is not rank 0",
    (warnings, "showwarning", show_warning),
)
