"""Standard input, output and error of a rank: rank 0 has them, the others see what it sees."""

from __future__ import annotations

import fcntl
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from instep.unedited.rank0_relay import Relay

T = TypeVar("T")
Function = Callable[..., Any]
_os_read = os.read


@dataclass(frozen=True)
class Terminal:
    """What rank 0's three streams are."""

    is_one: tuple[bool, ...]
    """Whether stdin, stdout, stderr are terminals."""
    sizes: tuple[tuple[int, int] | None, ...]
    """Columns and lines of each; None where it has none."""

    @classmethod
    def here(cls) -> Terminal:
        """Those of this process."""
        return cls(tuple(map(os.isatty, range(3))), tuple(map(_size, range(3))))


def _size(fd: int) -> tuple[int, int] | None:
    try:
        return tuple(os.get_terminal_size(fd))  # type: ignore[return-value]
    except OSError:
        return None


class Streams:
    """This rank's streams, from `enter` to `leave`."""

    def __init__(self, rank: int, terminal: Terminal, relay: Relay) -> None:
        self.terminal = terminal
        self._rank = rank
        self._relay = relay
        self._kept: list[int] = []
        self._stdin = sys.stdin

    def enter(self) -> None:
        """Rank 0 shares what it reads; of the others nothing is heard."""
        if self._rank != 0:
            self._mute()
        if self._stdin is not None:
            sys.stdin = io.TextIOWrapper(
                io.BufferedReader(_Input(self)),
                encoding=self._stdin.encoding,
                errors=self._stdin.errors,
                line_buffering=bool(self._stdin.line_buffering),
            )
            self._answer_isatty(sys.stdin, 0)

    def told(self, what: str, do: Callable[[], T], otherwise: T) -> T:
        """What `do()` gives on rank 0; `otherwise`, where only this rank may be asking."""
        if self._relay.reaches_here():
            return self._relay.once(what, do)
        return do() if self._rank == 0 else otherwise

    def leave(self) -> None:
        """They are what they were. What was read ahead for sys.stdin is lost with it."""
        sys.stdin = self._stdin
        if self._kept:
            _flush()
            for fd, kept in enumerate(self._kept):
                os.dup2(kept, fd)
                os.close(kept)
            self._kept.clear()
            for stream in (sys.__stdout__, sys.__stderr__):
                vars(stream).pop("isatty", None)

    def _mute(self) -> None:
        _flush()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            self._kept.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
            os.dup2(nothing, fd)
        os.close(nothing)
        for fd, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
            self._answer_isatty(stream, fd)

    def _answer_isatty(self, stream: Any, fd: int) -> None:
        if stream is not None:
            stream.isatty = lambda: self.terminal.is_one[fd]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


class _Input(io.RawIOBase):
    """File descriptor 0 of rank 0, on every rank."""

    name = "<stdin>"

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def fileno(self) -> int:
        """Where rank 0 reads."""
        return 0

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase has it."""
        count = len(buffer)
        data = self._streams.told("standard input", lambda: _os_read(0, count), b"")
        buffer[: len(data)] = data
        return len(data)


# --------------------------------------------------------------------------- for the table

_current: list[Streams] = []


def use(streams: Streams | None) -> None:
    """The functions below answer for these streams; None: they are what they are."""
    _current[:] = [] if streams is None else [streams]


def input_(original: Function, prompt: object = "") -> Any:
    """For `input`, which at a terminal does not read sys.stdin."""
    if not _current or not _current[0].terminal.is_one[0]:
        return original(prompt)
    line = _current[0].told("input()", lambda: original(prompt), None)
    if line is None:
        raise EOFError("EOF when reading a line")
    return line


def read(original: Function, fd: int, length: int) -> Any:
    """For os.read."""
    if not _current or fd != 0:
        return original(fd, length)
    return _current[0].told("standard input", lambda: original(fd, length), b"")


def isatty(original: Function, fd: int) -> Any:
    """For os.isatty."""
    return _current[0].terminal.is_one[fd] if _current and fd in range(3) else original(fd)


def terminal_size(original: Function, fd: int = 1) -> Any:
    """For os.get_terminal_size."""
    size = _current[0].terminal.sizes[fd] if _current and fd in range(3) else None
    return original(fd) if size is None else os.terminal_size(size)
