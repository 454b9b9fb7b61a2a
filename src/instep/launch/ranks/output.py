"""The ranks' output: one class for each value of `--output`.

Rank 0 inherits the user's stdout and stderr, so that a terminal stays a terminal. Only with a
folder does rank 0 write to files as well.
"""

from __future__ import annotations

import os
import select
import selectors
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from instep.errors import CommandLineError
from instep.process import write_text
from instep.process.failures.record import Failure

STDOUT, STDERR = 1, 2
INHERITED = None
"""For Popen: the child inherits this process's stream."""
Streams = tuple[int | None, int | None]
"""stdout and stderr of a rank, as Popen takes them."""


class OutputMode(Protocol):
    """What is done with the output of the ranks."""

    def streams(self, rank: int) -> Streams:
        """The streams for this rank."""

    def start(self) -> None:
        """Begin to forward output; ranks have been started. Again after each further rank."""

    def finish(self, failures: Sequence[Failure]) -> None:
        """Forward the rest; all ranks have ended."""


def choose_output(name: str, *, append: bool = False) -> OutputMode:
    """`prefix`, `rank0` or a folder, where files are replaced unless the output is appended.

    Raises CommandLineError if the folder cannot be written.
    """
    known: dict[str, type[OutputMode]] = {"prefix": PrefixedOutput, "rank0": Rank0Output}
    return known[name]() if name in known else FolderOutput(Path(name), append=append)


class Rank0Output:
    """Rank 0 prints; the output of the other ranks is discarded."""

    def streams(self, rank: int) -> Streams:
        """Rank 0 inherits; /dev/null for the others."""
        return (INHERITED, INHERITED) if rank == 0 else (subprocess.DEVNULL, subprocess.DEVNULL)

    def start(self) -> None:
        """Nothing to do."""

    def finish(self, failures: Sequence[Failure]) -> None:
        """Nothing to do."""


def _cannot_write(path: Path, why: str) -> CommandLineError:
    return CommandLineError(
        f"cannot write the ranks' output to {path}: {why}. Choose another folder."
    )


class FolderOutput:
    """Every rank writes to its own files, rank1.out and rank1.err."""

    def __init__(self, path: Path, *, append: bool) -> None:
        self._path = path
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC)
        self._opened: list[int] = []
        self._begun: set[str] = set()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(path, error.strerror or str(error)) from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise _cannot_write(path, "it is not writable")

    def streams(self, rank: int) -> Streams:
        """Two files."""
        return self._open(rank, "out"), self._open(rank, "err")

    def _open(self, rank: int, suffix: str) -> int:
        path = self._path / f"rank{rank}.{suffix}"
        flags = self._flags & ~os.O_TRUNC if path.name in self._begun else self._flags
        self._begun.add(path.name)
        try:
            fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise _cannot_write(path, error.strerror or str(error)) from None
        self._opened.append(fd)
        return fd

    def start(self) -> None:
        """Close this process's descriptors: the ranks have theirs."""
        for fd in self._opened:
            os.close(fd)
        self._opened.clear()

    def finish(self, failures: Sequence[Failure]) -> None:
        """Append every failed rank's traceback to its own file."""
        for failure in failures:
            path = self._path / f"rank{failure.rank}.err"
            try:
                with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(failure.text)
            except OSError as error:  # the disk is full; the report on the terminal has the rest
                write_text(STDERR, f"instep: cannot write {path}: {error.strerror}\n")


class PrefixedOutput:
    """Rank 0 prints; the lines of the other ranks follow on the same stream after `[1] `.

    A thread forwards the lines, so that a pager that does not read cannot block the supervisor.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._child_ends: list[int] = []
        stop, self._stopper = os.pipe()
        self._selector.register(stop, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._forward_lines, name="instep output", daemon=True
        )

    def streams(self, rank: int) -> Streams:
        """Rank 0 inherits; two pipes for each other rank."""
        if rank == 0:
            return INHERITED, INHERITED
        return self._pipe(rank, STDOUT), self._pipe(rank, STDERR)

    def _pipe(self, rank: int, target: int) -> int:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._selector.register(ours, selectors.EVENT_READ, _LineForwarder(rank, target))
        self._child_ends.append(theirs)
        return theirs

    def start(self) -> None:
        """Close the writing ends, which the ranks have, and start the thread."""
        for fd in self._child_ends:
            os.close(fd)
        self._child_ends.clear()
        if self._thread.ident is None:
            self._thread.start()

    def finish(self, failures: Sequence[Failure]) -> None:
        """Forward what is in the pipes, even if a process still holds one open."""
        os.close(self._stopper)
        if self._thread.ident is not None:
            self._thread.join()
        ours = [key.fd for key in self._selector.get_map().values()]
        for fd in ours + self._child_ends:
            os.close(fd)
        self._selector.close()

    def _forward_lines(self) -> None:
        stopping = False
        while not stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    stopping = True
                elif not key.data.forward(key.fd):
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                while key.data.forward(key.fd):
                    pass


class _LineForwarder:
    """Forwards one stream of one rank, line by line."""

    def __init__(self, rank: int, target: int) -> None:
        self._prefix = f"[{rank}] ".encode()
        self._target = target
        self._partial: list[bytes] = []
        """The pieces of a line that has not ended yet."""

    def forward(self, source: int) -> bool:
        """Forward what can be read now. False at the end of the stream."""
        try:
            data = os.read(source, 65536)
        except BlockingIOError:
            data = b""
        if not data:
            if self._partial:
                self._write(b"".join(self._partial) + b"\n")
                self._partial = []
            return False
        *lines, partial = data.split(b"\n")
        for line in lines:
            self._write(b"".join([*self._partial, line]) + b"\n")
            self._partial = []
        if partial:
            self._partial.append(partial)
        return True

    def _write(self, line: bytes) -> None:
        rest = memoryview(self._prefix + line)
        while rest:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:  # a terminal that another program left non-blocking
                select.select([], [self._target], [])
            except OSError:  # nobody reads this stream any more
                return
