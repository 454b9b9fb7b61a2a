"""Signals before a time limit: they ask for a checkpoint, after which the job ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""Slurm sends the first where `--signal` says so, and SIGTERM at the limit or a preemption."""


class SignalFlag:
    """Whether such a signal has come. Signals that the script handles, or ignores, stay its own."""

    def __init__(self) -> None:
        self.is_set = False
        self._kept: list[signal.Signals] = []
        if threading.current_thread() is threading.main_thread():
            self._kept = [n for n in SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
        for number in self._kept:
            signal.signal(number, self._set)

    def remove(self) -> None:
        """Let the signals end this process again."""
        for number in self._kept:
            if signal.getsignal(number) == self._set:
                signal.signal(number, signal.SIG_DFL)
        self._kept = []

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
