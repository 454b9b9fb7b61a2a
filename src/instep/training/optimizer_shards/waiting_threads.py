"""Whether other threads of this process wait, so that memory which they may have read can go.

An operation of PyTorch lets go of the interpreter's lock while it reads a tensor's memory, and
nothing counts that it does. But its thread's innermost Python frame is the one that called it.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from instep.distributed.watchdog.call_stack import no_garbage_collection

_WAITS = {
    ("threading", "wait"),
    ("threading", "_wait_for_tstate_lock"),
    ("threading", "join"),
    ("queue", "get"),
    ("selectors", "select"),
    ("socket", "accept"),
    ("socket", "readinto"),
    ("concurrent.futures.thread", "_worker"),
    ("multiprocessing.connection", "_poll"),
    ("multiprocessing.connection", "_recv"),
    ("multiprocessing.connection", "wait"),
    ("multiprocessing.synchronize", "__enter__"),
    ("subprocess", "_try_wait"),
    ("instep.distributed.shm.work_queue", "_serve_one"),
}
"""Functions, by their modules, that call nothing that reads a tensor by themselves."""


def do_others_wait() -> bool:
    """Whether no other Python thread is within an operation of PyTorch, or about to begin one.

    A thread in a function that is not known to wait counts as one that may be.
    """
    with no_garbage_collection():
        frames = sys._current_frames()  # of one moment: this thread has the interpreter's lock
    del frames[threading.get_ident()]  # which would hold itself, and all that its callers hold
    return all(map(_is_waiting, frames.values()))


def _is_waiting(frame: FrameType) -> bool:
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) in _WAITS
