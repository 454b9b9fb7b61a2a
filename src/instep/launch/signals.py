"""Signals that ask a command to end: queued for a selector, or raised as SystemExit; and those by
which it then ends its ranks."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

from instep.process import in_main_thread
from instep.process.procfs import handles_signal

TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPORT_SIGNALS = (signal.SIGQUIT, signal.SIGUSR1)
"""They ask for a report on the job: where its ranks are (Ctrl-\\), and how fast."""
PASSED_SIGNALS = (signal.SIGUSR2,)
"""The ranks get them. One that does not handle them ends, as under plain Python."""


@dataclass(frozen=True)
class EndStep:
    """One step of ending a job: a signal, then a wait."""

    signal: signal.Signals | None
    """The signal to every rank that still runs; None: no signal."""
    timeout: float
    """Seconds until the next step."""


KILL = EndStep(signal.SIGKILL, float("inf"))
AFTER_FAILURE = (
    EndStep(None, 0.1),  # ranks that fail for the same reason may still report it
    EndStep(signal.SIGTERM, 1.0),
    KILL,
)
AFTER_INTERRUPT = (
    EndStep(None, 30.0),  # one rank has ended by it; another may be writing a checkpoint
    EndStep(signal.SIGTERM, 1.0),
    KILL,
)
AFTER_SIGNAL = {
    # The script may catch it and continue, until a second SIGINT; a third one kills at once.
    signal.SIGINT: (EndStep(signal.SIGINT, float("inf")), EndStep(signal.SIGTERM, 5.0), KILL),
    signal.SIGTERM: (EndStep(signal.SIGTERM, 30.0), KILL),  # time to write a checkpoint
    signal.SIGHUP: (EndStep(signal.SIGTERM, 30.0), KILL),
}


class SignalQueue:
    """A context manager that queues signals which would end this process: TERMINATION_SIGNALS,
    REPORT_SIGNALS and PASSED_SIGNALS.

    Python delivers signals to the main thread, so that in another thread none is queued.
    """

    def __init__(self) -> None:
        numbers = (*TERMINATION_SIGNALS, *REPORT_SIGNALS, *PASSED_SIGNALS)
        handled = numbers if in_main_thread() else ()
        self._before = _handlers(handled)
        self._receiver, self._sender = socket.socketpair()

    def __enter__(self) -> SignalQueue:
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        if self._before:
            self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in self._before:
            signal.signal(number, _ignore_handled)
        return self

    def fileno(self) -> int:
        """For a selector: readable if a signal is queued."""
        return self._receiver.fileno()

    def pop_all(self) -> list[signal.Signals]:
        """The queued signals, in the order of their arrival."""
        try:
            return [signal.Signals(n) for n in self._receiver.recv(4096) if n in self._before]
        except BlockingIOError:
            return []

    def restore_defaults(self) -> None:
        """Let each of them end this process again, because nothing is left to clean up."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._receiver.close()
        self._sender.close()


_Handler = Callable[[int, FrameType | None], Any] | int


def _handlers(numbers: Iterable[signal.Signals]) -> dict[signal.Signals, _Handler]:
    """The handlers of these signals that may be replaced for a while.

    A signal that was ignored (by nohup, or by a shell for a background job) stays ignored, and one
    that C code handles (faulthandler, or a program which embeds Python) stays with it, because
    Python cannot give it back.
    """
    found = {number: signal.getsignal(number) for number in numbers}
    return {
        number: handler
        for number, handler in found.items()
        if handler not in (signal.SIG_IGN, None)
        and not (handler is signal.SIG_DFL and handles_signal(os.getpid(), number))
    }


def _ignore_handled(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal is in the queue through the wakeup file descriptor."""


def exit_on_signal() -> AbstractContextManager[None]:
    """Inside, a termination signal raises SystemExit with the code that a shell would report, so
    that started processes are ended and temporary files are removed. Enter it in the main thread.
    """
    return _handled_by(_leave)


def ignored_signals() -> AbstractContextManager[None]:
    """Inside, no termination signal is heeded. Does nothing in another thread than the main one."""
    return _handled_by(signal.SIG_IGN) if in_main_thread() else nullcontext()


@contextmanager
def _handled_by(handler: _Handler) -> Iterator[None]:
    before = _handlers(TERMINATION_SIGNALS)
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, before[number])


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
