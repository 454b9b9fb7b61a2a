"""The last known position of a rank in its script, for one that dies without a traceback.

A fatal signal (SIGSEGV, SIGABRT, ...) leaves faulthandler's report of it; before SIGKILL there is
only the line at which the rank was some seconds ago.
"""

from __future__ import annotations

import faulthandler
import os
import time

from instep.process import PACKAGE_FOLDER

_BYTES = 4096
"""Size of a file that holds one line: it is written at once, over what was there."""


class LastPosition:
    """The files of one rank, beside the one for its failure."""

    def __init__(self, failure_file: str | os.PathLike[str]) -> None:
        path = os.fspath(failure_file)
        self.line_file = f"{path}.seen"
        """For `write_position`."""
        self.finished_file = f"{path}.left"
        """A rank that comes to its end with exit code 0 writes its line there."""
        self.crash_file = f"{path}.crash"
        """For `enable_faulthandler`."""

    def has_finished(self) -> bool:
        """Whether the rank came to its end with exit code 0."""
        return os.path.exists(self.finished_file)

    def describe(self, code: int, ended: float) -> str:
        """Lines about a rank that ended at the time `ended`, by `time.monotonic`; empty where
        nothing is known."""
        if self.has_finished() and code <= 0:
            return f"It left at {_read(self.finished_file)}.\n"
        crash = _read(self.crash_file) if code < 0 else ""
        return format_last_words(crash, _read(self.line_file), ended)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def enable_faulthandler(fd: int) -> None:
    """Let a fatal signal write a traceback to this file, unless the user has enabled faulthandler
    already."""
    if not faulthandler.is_enabled():
        faulthandler.enable(fd, all_threads=False)


def write_position(fd: int, line: str, seen: float | None = None) -> None:
    """Record that this rank is at this line now, or was at the time `seen`, by `time.monotonic`:
    all processes of a host have that clock, and nobody sets it."""
    seen = time.monotonic() if seen is None else seen
    os.pwrite(fd, f"{seen} {line}".encode()[:_BYTES].ljust(_BYTES, b"\0"), 0)


def write_later_position(fd: int, seen: float, line: str) -> None:
    """Record that this rank was at this line at the time `seen`, unless it was seen later."""
    recorded = read_whole(fd).partition(" ")[0]
    if not recorded.strip("\0") or float(recorded) < seen:
        write_position(fd, line, seen)


def read_whole(fd: int | None) -> str:
    """The text of a file by its descriptor; empty where there is none."""
    if fd is None:
        return ""
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


def format_position(written: str, ended: float) -> str:
    """A line for people about the text that `write_position` wrote."""
    seen, _, line = written.rstrip("\0").partition(" ")
    if not line:
        return ""
    before = max(0.0, ended - float(seen))
    return f"It was last seen at {line}, {before:.1f} s before its end.\n"


def format_last_words(crash: str, written: str, ended: float) -> str:
    """What is known about a rank that died: faulthandler's report, if there is one, and the rank's
    last position, unless the report has a line (a thread of C++ that aborts has none)."""
    report = format_fatal_signal(crash)
    return report if '  File "' in report else report + format_position(written, ended)


def format_fatal_signal(crash: str) -> str:
    """faulthandler's report, without frames of instep and of the interpreter."""
    lines = crash.split("\n\nExtension modules:")[0].splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if not line.startswith((f'  File "{PACKAGE_FOLDER}', '  File "<frozen '))
    ]
    return "".join(kept).rstrip() + "\n" if kept else ""
