"""In the rank: the Python stacks of all threads, on request.

The rank's listener thread formats them. It cannot while C code holds the interpreter's lock; then a
signal lets faulthandler, which needs no lock, write them into a file that the watcher reads. Loader
workers inherit the signal's handler and the file by fork.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading
from functools import cache

from instep.distributed.watchdog.call_stack import (
    NO_LINE,
    format_frames,
    main_thread_frames,
    thread_frames,
)

STACK_SIGNAL = signal.SIGRTMIN + 12
MAX_CHARACTERS = 100_000
"""Of all stacks of one process."""
_BREAKPOINT_FILES = ("/pdb.py", "/bdb.py", "/ipdb/__main__.py", "/IPython/core/debugger.py")
_OWN_THREADS = ("instep watch",)


@cache
def stack_file() -> int | None:
    """The descriptor of the file for faulthandler's stacks; None where the script uses the signal.

    From the first call on the signal is handled.
    """
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return None
    fd = os.memfd_create("stacks")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, fd, all_threads=True)
    return fd


def main_thread_fields() -> dict[str, object]:
    """The innermost frame of the main thread, and whether it is at a debugger's prompt, loads data
    or imports a module."""
    frames = main_thread_frames()
    files = [frame.f_code.co_filename for frame in frames]
    innermost = NO_LINE
    if frames:
        code = frames[0].f_code
        innermost = f"{os.path.basename(code.co_filename)}:{frames[0].f_lineno}, {code.co_name}"
    return {
        "innermost": innermost,
        "at_breakpoint": any(file.endswith(_BREAKPOINT_FILES) for file in files),
        "loads_data": any(file.endswith("torch/utils/data/dataloader.py") for file in files),
        "imports": any(file.startswith("<frozen importlib") for file in files),
    }


def format_stacks() -> str:
    """The stacks of all threads but instep's own, the main thread's first."""
    main = threading.main_thread()
    others = [t for t in threading.enumerate() if t is not main and t.name not in _OWN_THREADS]
    texts = []
    for thread in (main, *others):
        if frames := thread_frames(thread):
            head = f"Thread {thread.name} (most recent call last):\n"
            texts.append(head + format_frames(frames))
    return "".join(texts)[:MAX_CHARACTERS]
