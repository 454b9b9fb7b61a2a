"""Where a rank was when it was last seen: what remains of one that dies without a word.

A fatal signal (SIGSEGV, SIGABRT, ...) leaves Python's own account of it; before SIGKILL there is
only the line at which the rank was some seconds ago.
"""

from __future__ import annotations

import faulthandler
import os
import time

from instep.process import PACKAGE_FOLDER

_ROOM = 4096
"""Bytes of a file that holds one line: it is written at once, over what was there."""


class LastPosition:
    """The files of one rank, beside the one in which it says that it failed."""

    def __init__(self, failure_file: str | os.PathLike[str]) -> None:
        beside = os.fspath(failure_file)
        self.line_file = f"{beside}.seen"
        """For `write_position`."""
        self.left_file = f"{beside}.left"
        """Where a rank that comes to its end with exit code 0 writes at which line."""
        self.crash_file = f"{beside}.crash"
        """For `enable_faulthandler`."""

    def left(self) -> bool:
        """Whether the rank came to its end with exit code 0."""
        return os.path.exists(self.left_file)

    def told(self, code: int, ended: float) -> str:
        """What is known of a rank that ended at this time, as lines; empty where nothing is."""
        if self.left() and code <= 0:
            return f"It left at {_read(self.left_file)}.\n"
        crash = _read(self.crash_file) if code < 0 else ""
        return format_crash(crash) or format_position(_read(self.line_file), ended)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def enable_faulthandler(fd: int) -> None:
    """A fatal signal writes to this file where the program was, unless the user has seen to it."""
    if not faulthandler.is_enabled():
        faulthandler.enable(fd, all_threads=False)


def write_position(fd: int, line: str) -> None:
    """This rank is at this line, now."""
    os.pwrite(fd, f"{time.time()} {line}".encode()[:_ROOM].ljust(_ROOM, b"\0"), 0)


def format_position(noted: str, ended: float) -> str:
    """What `write_position` has written, for people."""
    moment, _, line = noted.rstrip("\0").partition(" ")
    if not line:
        return ""
    before = max(0.0, ended - float(moment))
    return f"It was last seen at {line}, {before:.1f} s before its end.\n"


def format_crash(crash: str) -> str:
    """Python's account of a fatal signal, without what lies outside of the script."""
    lines = crash.split("\n\nExtension modules:")[0].splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if not line.startswith((f'  File "{PACKAGE_FOLDER}', '  File "<frozen '))
    ]
    return "".join(kept).rstrip() + "\n" if kept else ""
