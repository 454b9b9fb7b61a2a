"""A file that is being written, and for whose end the processes that end this one wait a little.

Between processes of one job there is a mark: a file that holds the path of the draft and is there
while the draft is written. `instep run`, for whom it is named like the rank's failure file, looks
for it before it ends the ranks after a failure. Under other launchers the rank's watcher removes
what a rank that was killed has left. A rank that its watcher tells to leave asks `wait_for_writes`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

WAIT_LIMIT = 10.0
"""Seconds that others wait for the files that a rank is writing when another one has failed."""
MARKER_NAME = "writing"
"""The mark's name in a rank's own folder, where there is no failure file."""
DRAFT_PREFIX = ".instep-"
"""How the folder of a draft begins; the draft in it has the name of the file that it will be."""

_changed = threading.Condition()
_drafts: dict[str, int] = {}
_marks: list[Path] = []


def marker_path(failure_file: Path) -> Path:
    """Where the rank of this failure file says that it is writing."""
    return failure_file.with_suffix(".writing")


def set_marker(mark: Path) -> None:
    """From now on this process says at `mark` what it is writing."""
    _marks[:] = [mark]


@contextmanager
def track_write(draft: str) -> Iterator[None]:
    """In here `draft` is written. SIGTERM, where nobody handles it, takes effect at the end."""
    with _sigterm_at_the_end():
        _count(draft, 1)
        try:
            yield
        finally:
            _count(draft, -1)


def has_pending_writes() -> bool:
    """Whether any thread of this process writes such a file."""
    return bool(_drafts)


def wait_for_writes(limit: float = WAIT_LIMIT) -> None:
    """Return when no thread of this process writes such a file any more, or after `limit`."""
    with _changed:
        _changed.wait_for(lambda: not _drafts, limit)


def remove_drafts(mark: Path) -> None:
    """Remove what a rank that was killed left of its drafts."""
    try:
        drafts = mark.read_text().splitlines()
    except FileNotFoundError:
        return
    for draft in drafts:
        folder = os.path.dirname(draft)
        if os.path.basename(folder).startswith(DRAFT_PREFIX):
            with suppress(OSError):
                os.unlink(draft)
            with suppress(OSError):
                os.rmdir(folder)
    mark.unlink()


def _count(draft: str, change: int) -> None:
    with _changed:
        _drafts[draft] = _drafts.get(draft, 0) + change
        if not _drafts[draft]:
            del _drafts[draft]
        for mark in _marks:
            if _drafts:
                mark.write_text("\n".join(_drafts))
            else:
                mark.unlink(missing_ok=True)
        _changed.notify_all()


@contextmanager
def _sigterm_at_the_end() -> Iterator[None]:
    """mpirun and srun send it to all ranks as soon as one has failed."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    came: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(time.monotonic())

    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGTERM)
