"""Files that are being written, and the wait of the processes that end this one for them.

A marker tells other processes of the job: a file that holds the path of the draft and exists while
the draft is written. `instep run` names it like the rank's failure file, and looks for it before
it ends the ranks after a failure. Under other launchers the rank's watcher removes the drafts of a
rank that was killed. A rank that its watcher tells to leave calls `wait_for_writes`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from instep.process import in_main_thread
from instep.process.process_value import ProcessValue

WAIT_LIMIT = 10.0
"""Seconds that others wait for the files that a rank is writing when another one has failed."""
MARKER_NAME = "writing"
"""The marker's name in a rank's own folder, where there is no failure file."""
DRAFT_PREFIX = ".instep-"
"""How the folder of a draft begins; the draft in it has the name of the file that it will be."""
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
"""Flags of open(2) that say that the file may be changed."""

_changed = threading.Condition()
_drafts: dict[str, int] = {}
_marker = ProcessValue[Path | None](None)


def opens_to_write(mode: str | None, flags: int = 0) -> bool:
    """Whether a file that is opened so may be changed: by the mode of `open`, or, where there is
    none, the flags of open(2)."""
    return bool({*mode} & {*"wax+"}) if isinstance(mode, str) else bool(flags & WRITE_FLAGS)


def marker_path(failure_file: Path) -> Path:
    """The marker of the rank with this failure file."""
    return failure_file.with_suffix(".writing")


def set_marker(marker: Path) -> None:
    """Let this process keep the marker from now on."""
    _marker.value = marker


def marked_file(path: str) -> str:
    """The draft that was begun last, if `path` is the marker of this process; else `path`."""
    return next(reversed(_drafts), path) if path == str(_marker.value) else path


@contextmanager
def track_write(draft: str) -> Iterator[None]:
    """In here `draft` is written. SIGTERM, unless it has a handler, takes effect at the end."""
    with _delay_sigterm():
        _count(draft, 1)
        try:
            yield
        finally:
            _count(draft, -1)


def has_pending_writes() -> bool:
    """Whether any thread of this process writes such a file."""
    return bool(_drafts)


def wait_for_writes() -> None:
    """Return when no thread of this process writes such a file any more, or after WAIT_LIMIT."""
    with _changed:
        _changed.wait_for(lambda: not _drafts, WAIT_LIMIT)


def remove_drafts(marker: Path) -> None:
    """Remove the drafts of a rank that was killed."""
    try:
        drafts = os.fsdecode(marker.read_bytes()).split("\0")
    except FileNotFoundError:
        return
    for draft in drafts:
        folder = os.path.dirname(draft)
        if os.path.basename(folder).startswith(DRAFT_PREFIX):
            with suppress(OSError):
                os.unlink(draft)
            with suppress(OSError):
                os.rmdir(folder)
    marker.unlink()


def _count(draft: str, change: int) -> None:
    with _changed:
        _drafts[draft] = _drafts.get(draft, 0) + change
        if not _drafts[draft]:
            del _drafts[draft]
        if _marker.value is not None and _drafts:
            _marker.value.write_bytes(os.fsencode("\0".join(_drafts)))
        elif _marker.value is not None:
            _marker.value.unlink(missing_ok=True)
        _changed.notify_all()


@contextmanager
def _delay_sigterm() -> Iterator[None]:
    """mpirun and srun send SIGTERM to all ranks as soon as one has failed."""
    if not in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    received = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        received.set()

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received.is_set():
            signal.raise_signal(signal.SIGTERM)
