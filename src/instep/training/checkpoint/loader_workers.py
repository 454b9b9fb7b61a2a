"""Workers of loaders that outlive the signals before a time limit.

Slurm and torchrun send such a signal to every process of a job. The rank saves at its next step,
and needs its loader's workers until then.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from instep.process.patching import Function, Patch, PatchHandle

_kept: list[signal.Signals] = []
"""The signals for which the training is saved; none where nothing saves it now."""


def protect_workers(signals: Sequence[signal.Signals]) -> None:
    """Let the workers that DataLoaders start from now on outlive these signals; none: no more."""
    _kept[:] = signals
    if signals:
        _patch_loaders()


@functools.cache
def _patch_loaders() -> None:
    PatchHandle([Patch(DataLoader, "_get_iterator", _start, compile="break")])


def _start(original: Function, loader: DataLoader[Any]) -> Any:
    if not loader.num_workers or not _kept:
        return original(loader)
    of_script = loader.worker_init_fn
    others = {child.pid for child in multiprocessing.active_children()}
    loader.worker_init_fn = _WorkerInit(of_script, (*_kept,))
    try:
        return original(loader)
    finally:
        loader.worker_init_fn = of_script
        for child in multiprocessing.active_children():
            if child.pid not in others:
                process: Any = child
                process._popen.terminate = process._popen.kill  # torch's way to end one that hangs


class _WorkerInit:
    """The `worker_init_fn` of such a worker, after that of the script."""

    def __init__(
        self, of_script: Callable[[int], None] | None, signals: Sequence[signal.Signals]
    ) -> None:
        self._of_script, self._signals = of_script, signals

    def __call__(self, worker: int) -> None:
        before = {number: signal.getsignal(number) for number in self._signals}
        if self._of_script is not None:
            self._of_script(worker)
        for number, handler in before.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, _IgnoredSignal())


class _IgnoredSignal:
    """A handler that does nothing in the process that has installed it. (What is ignored would be
    ignored by the commands that it starts, too.)"""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
