"""Signals to the supervisor, as something that a selector can wait for."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType

ASKED_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Mailbox:
    """While it is open, signals that ask this process to end are collected, not obeyed.

    One that was ignored (by nohup, or for a shell's background job) stays ignored. In another
    thread than the main one, to which Python brings them, none is collected. A context manager.
    """

    def __init__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in ASKED_TO_END}
        kept = [n for n in ASKED_TO_END if self._before[n] is not signal.SIG_IGN]
        self._kept = kept if threading.current_thread() is threading.main_thread() else []
        self._inbox, self._entry = socket.socketpair()

    def __enter__(self) -> Mailbox:
        self._inbox.setblocking(False)
        self._entry.setblocking(False)
        if self._kept:
            self._wakeup = signal.set_wakeup_fd(self._entry.fileno(), warn_on_full_buffer=False)
        for number in self._kept:
            signal.signal(number, _to_the_mailbox)
        return self

    def fileno(self) -> int:
        """Readable when there is a signal."""
        return self._inbox.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals that came since the last time, in their order."""
        try:
            return [signal.Signals(n) for n in self._inbox.recv(4096) if n in self._kept]
        except BlockingIOError:
            return []

    def obey(self) -> None:
        """From now on each of them simply ends this process: nothing is left to look after."""
        for number in self._kept:
            signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        if self._kept:
            signal.set_wakeup_fd(self._wakeup)
        for number in self._kept:
            signal.signal(number, self._before[number])
        self._inbox.close()
        self._entry.close()


def _to_the_mailbox(number: int, frame: FrameType | None) -> None:
    """The wakeup file descriptor has taken it already."""
