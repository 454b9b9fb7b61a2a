"""Start a run of the script so that the files that it changes are put back when it has ended."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from instep.errors import VerificationError
from instep.launch.signals import ignored_signals
from instep.verify.files.file_calls import FileCall, receive, send_response
from instep.verify.files.file_copies import FileCopies

Start = Callable[..., subprocess.Popen[Any]]


@contextmanager
def put_back(folder: Path) -> Iterator[Start]:
    """Yield a function that starts one process, as subprocess.Popen does.

    When the block ends, whose process must have ended by then, every file that this process and
    those started by it have changed is as it was, and what they have made is gone. Files in
    `folder` stay as they are; the copies lie there meanwhile.

    Raises VerificationError: in the function if the kernel does not tell of changes, and at the
    end if a file could not be copied or put back; what could not be copied was not changed.
    """
    kept = FileCopies(folder)
    watches: list[_Watch] = []

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            number = str(theirs.fileno())
            first = [sys.executable, "-m", "instep.verify.files.first_process", number]
            process = subprocess.Popen([*first, *command], pass_fds=[theirs.fileno()], **options)
            theirs.close()
            words, listeners, *_ = socket.recv_fds(ours, 1000, 1)
        if not listeners:
            process.wait()
            raise VerificationError(
                "the kernel does not tell here which files the script changes "
                f"({words.decode() or 'the run ended at once'}), so they could not be put back. "
                "With --overwrite each run writes over the script's files: copy those first that "
                "are to stay."
            )
        watches.append(_Watch(listeners[0], kept))
        return process

    try:
        yield start
    finally:
        with ignored_signals():
            for watch in watches:
                watch.end()
            kept.restore()
        for watch in watches:
            watch.check()


class _Watch:
    """A thread that keeps each file before the run changes it."""

    def __init__(self, listener: int, kept: FileCopies) -> None:
        self._listener, self._kept = listener, kept
        self._failure: str | None = None
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._answer_all, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop. What the run has left behind can change no file from then on."""
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)
        os.close(self._listener)

    def check(self) -> None:
        """Raise VerificationError if a file could not be kept."""
        if self._failure is not None:
            raise VerificationError(
                f"{self._failure}, so a run of the script was not allowed to change it. Set TMPDIR "
                "to a folder with room for copies of all files that the script writes over; with "
                "--overwrite there are no copies, and each run writes over the script's files."
            )

    def _answer_all(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if self._stop in events:
                return
            if not events[self._listener] & select.POLLIN:  # the run has no process any more
                poll.unregister(self._listener)
            elif (call := receive(self._listener)) is not None:
                send_response(self._listener, call, self._keep(call))

    def _keep(self, call: FileCall) -> int:
        """Keep what the call changes. Returns the number of the error with which it is to fail."""
        try:
            paths = call.paths()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            return 0
        except OSError as error:
            self._failure = self._failure or f"cannot see which file a process changes ({error})"
            return errno.EACCES
        try:
            if call.moves and len(paths) == 2:
                self._kept.keep_rename(*paths)
            else:
                for path in paths:
                    self._kept.keep(path)
        except OSError as error:
            self._failure = self._failure or f"cannot keep a copy of {' or '.join(paths)} ({error})"
            return error.errno or errno.EACCES
        return 0
