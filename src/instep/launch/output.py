"""Where the ranks' output goes: one way per value of `--output`.

Rank 0 writes straight to the user's stdout and stderr, so that a terminal stays a terminal; only
a folder takes its output too.
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
from instep.process.failure import Failure

STDOUT, STDERR = 1, 2
INHERITED = None
"""For Popen: the child writes where this process writes."""
Streams = tuple[int | None, int | None]
"""stdout and stderr of a rank, as Popen takes them."""


class OutputMode(Protocol):
    """One way to treat what the ranks print."""

    def streams(self, rank: int) -> Streams:
        """Where `rank` shall write."""

    def start(self) -> None:
        """All ranks have started."""

    def finish(self, failures: Sequence[Failure]) -> None:
        """No rank writes any more: bring out what is still on its way."""


def choose_output(name: str) -> OutputMode:
    """`prefix`, `rank0` or a folder. Raises CommandLineError if the folder cannot be written."""
    known: dict[str, type[OutputMode]] = {"prefix": PrefixedOutput, "rank0": Rank0Output}
    return known[name]() if name in known else FolderOutput(Path(name))


class Rank0Output:
    """Rank 0 prints, the others are not heard."""

    def streams(self, rank: int) -> Streams:
        """Rank 0 untouched, nothing for the others."""
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
    """Every rank writes to files of its own, rank1.out and rank1.err; earlier ones go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: list[int] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(path, error.strerror or str(error)) from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise _cannot_write(path, "it is not writable")

    def streams(self, rank: int) -> Streams:
        """Two new files."""
        return self._open(rank, "out"), self._open(rank, "err")

    def _open(self, rank: int, suffix: str) -> int:
        path = self._path / f"rank{rank}.{suffix}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        except OSError as error:
            raise _cannot_write(path, error.strerror or str(error)) from None
        self._opened.append(fd)
        return fd

    def start(self) -> None:
        """The ranks hold the files now."""
        for fd in self._opened:
            os.close(fd)

    def finish(self, failures: Sequence[Failure]) -> None:
        """Every rank's own traceback belongs to its file, whoever failed first."""
        for failure in failures:
            path = self._path / f"rank{failure.rank}.err"
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(failure.text)
            except OSError as error:  # the disk is full: the report on the terminal says the rest
                os.write(STDERR, f"instep: cannot write {path}: {error.strerror}\n".encode())


class PrefixedOutput:
    """Rank 0 untouched; each line of the others with `[1] ` before it, on the same stream.

    A thread carries the lines, so that a reader who does not read (a pager) cannot keep the
    supervisor from its work.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._child_ends: list[int] = []
        self._stop, self._stopper = os.pipe()
        self._thread = threading.Thread(
            target=self._forward_lines, name="instep output", daemon=True
        )

    def streams(self, rank: int) -> Streams:
        """Rank 0 untouched, two pipes for any other."""
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
        """The ranks hold the writing ends now; carry what comes."""
        for fd in self._child_ends:
            os.close(fd)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread.start()

    def finish(self, failures: Sequence[Failure]) -> None:
        """Bring out what is in the pipes, even if somebody still holds one open."""
        os.close(self._stopper)
        if self._thread.ident is not None:
            self._thread.join()

    def _forward_lines(self) -> None:
        while True:
            ready = [key for key, _ in self._selector.select()]
            for key in ready:
                if key.data is not None and not key.data.forward(key.fd):
                    self._selector.unregister(key.fd)
            if any(key.fd == self._stop for key in ready):
                break
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                while key.data.forward(key.fd):
                    pass


class _LineForwarder:
    """The lines of one stream of one rank."""

    def __init__(self, rank: int, target: int) -> None:
        self._prefix = f"[{rank}] ".encode()
        self._target = target
        self._partial: list[bytes] = []
        """A line that has not ended yet, in pieces."""

    def forward(self, source: int) -> bool:
        """Carry what there is to read; False when there is nothing any more."""
        try:
            data = os.read(source, 65536)
        except BlockingIOError:
            data = b""
        if not data:
            self._write(b"".join(self._partial), end=b"\n")
            self._partial = []
            return False
        *lines, partial = data.split(b"\n")
        for line in lines:
            self._write(b"".join([*self._partial, line]) + b"\n")
            self._partial = []
        if partial:
            self._partial.append(partial)
        return True

    def _write(self, line: bytes, end: bytes = b"") -> None:
        if not line:
            return
        rest = memoryview(self._prefix + line + end)
        while rest:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:  # a terminal that another program left non-blocking
                select.select([], [self._target], [])
            except OSError:  # nobody reads this stream any more
                return
