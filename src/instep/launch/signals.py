"""Signals to a command of instep's: what a selector can wait for, or an exception."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalQueue:
    """While it is open, signals that ask this process to end are collected, not obeyed.

    One that was ignored (by nohup, or for a shell's background job) stays ignored. In another
    thread than the main one, to which Python brings them, none is collected. A context manager.
    """

    def __init__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}
        kept = [n for n in TERMINATION_SIGNALS if self._before[n] is not signal.SIG_IGN]
        self._kept = kept if threading.current_thread() is threading.main_thread() else []
        self._receiver, self._sender = socket.socketpair()

    def __enter__(self) -> SignalQueue:
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        if self._kept:
            self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in self._kept:
            signal.signal(number, _ignore_handled)
        return self

    def fileno(self) -> int:
        """Readable when there is a signal."""
        return self._receiver.fileno()

    def pop_all(self) -> list[signal.Signals]:
        """The signals that came since the last time, in their order."""
        try:
            return [signal.Signals(n) for n in self._receiver.recv(4096) if n in self._kept]
        except BlockingIOError:
            return []

    def restore_defaults(self) -> None:
        """From now on each of them simply ends this process: nothing is left to look after."""
        for number in self._kept:
            signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        if self._kept:
            signal.set_wakeup_fd(self._wakeup)
        for number in self._kept:
            signal.signal(number, self._before[number])
        self._receiver.close()
        self._sender.close()


def _ignore_handled(number: int, frame: FrameType | None) -> None:
    """The wakeup file descriptor has taken it already."""


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Inside, a signal that asks this process to end raises SystemExit with the code that a shell
    would report, so that what it has started is ended and what it has put down is removed.

    One that was ignored stays ignored. To be entered in the main thread.
    """
    before = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
