"""The script's handlers, which are called at the same point on every rank: patches of `signal`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from instep.distributed.watchdog.messages import COMMON_SIGNALS
from instep.distributed.watchdog.signals.rank_signals import on_signal, rank_signals
from instep.process.patching import PatchHandle, patches


def install() -> None:
    """From now on it is so, also of the handlers that the script has set before. Does nothing in
    other threads than the main one."""
    if not rank_signals.is_main_thread_of_rank():
        return
    for number in COMMON_SIGNALS:
        handler = signal.getsignal(number)
        if number != signal.SIGINT and callable(handler):
            set_handler(signal.signal, number, handler)
    PatchHandle(_PATCHES)


def set_handler(original: Callable[..., Any], signalnum: int, handler: Any) -> Any:
    """For signal.signal."""
    is_common = rank_signals.is_main_thread_of_rank() and signalnum in COMMON_SIGNALS
    if not is_common or _is_own_handler(handler):
        return original(signalnum, handler)
    common = rank_signals.find(signalnum)
    if signalnum == signal.SIGINT:
        if not rank_signals.has_ctrl_c:
            return original(signalnum, handler)
        before, common.handler = common.handler, handler
        return before
    before = common.handler
    common.handler = handler if callable(handler) else None
    found = original(signalnum, handler if common.handler is None else on_signal)
    return before if found is on_signal else found


def _is_own_handler(handler: Any) -> bool:
    """Whether it is one of instep's, such as that of `instep.Checkpoint`, whose ranks agree by
    themselves."""
    module = getattr(handler, "__module__", None)
    return isinstance(module, str) and module.startswith("instep.")


def get_handler(original: Callable[..., Any], signalnum: int) -> Any:
    """For signal.getsignal."""
    handler = original(signalnum)
    return rank_signals.find(signalnum).handler if handler is on_signal else handler


def raise_signal(original: Callable[..., Any], signalnum: int) -> Any:
    """For signal.raise_signal."""
    announce_own(signalnum)
    return original(signalnum)


def _kill(original: Callable[..., Any], pid: int, signalnum: int) -> Any:
    """For os.kill."""
    if pid == os.getpid():
        announce_own(signalnum)
    return original(pid, signalnum)


_PATCHES = patches(
    "a signal takes effect at the same point of the script on every rank",
    (signal, "signal", set_handler),
    (signal, "getsignal", get_handler),
    (signal, "raise_signal", raise_signal),
    (os, "kill", _kill),
)


def announce_own(number: int) -> None:
    """The script sends itself this signal at this point, on every rank."""
    if number == signal.SIGINT or number not in COMMON_SIGNALS:
        return
    if rank_signals.is_main_thread_of_rank():
        common = rank_signals.find(number)
        common.is_own = get_handler(signal.getsignal, number) is common.handler is not None
