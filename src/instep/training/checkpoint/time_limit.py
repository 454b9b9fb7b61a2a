"""Signals before a time limit: they ask for a checkpoint, after which the job ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from instep.process import in_main_thread
from instep.training.checkpoint.loader_workers import protect_workers

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""Slurm sends the first where `--signal` says so, and SIGTERM at the limit or a preemption."""


def expect_signals() -> None:
    """Steps that save are to come: let workers of loaders that start from now on outlive the
    signals that will ask for it."""
    if kept := _unhandled_signals():
        protect_workers(kept)


def _unhandled_signals() -> list[signal.Signals]:
    return [n for n in SIGNALS if signal.getsignal(n) is signal.SIG_DFL]


class SignalFlag:
    """Whether such a signal has come. Signals that the script handles, or ignores, stay its own."""

    def __init__(self, can_save: Callable[[FrameType | None], bool] = lambda frame: True) -> None:
        """`can_save` is called with the frame that a signal interrupts.

        If it returns False, nothing would be saved any more, and the signal ends this process.
        """
        self.is_set = False
        self._can_save = can_save
        self._process = os.getpid()
        self._kept: list[signal.Signals] = []
        if in_main_thread():
            self._kept = _unhandled_signals()
        for number in self._kept:
            signal.signal(number, self._set)
        protect_workers(self._kept)

    def remove(self) -> None:
        """Let the signals end this process again."""
        for number in self._kept:
            if signal.getsignal(number) == self._set:
                signal.signal(number, signal.SIG_DFL)
        self._kept = []
        protect_workers(())

    def _set(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process and self._can_save(frame):
            self.is_set = True
        else:  # in a forked child too: Pool.terminate() sends SIGTERM
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
