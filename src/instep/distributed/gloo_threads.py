"""Gloo's threads when a process exits.

A thread of ProcessGroupGloo releases the tensors of a collective after it has told the caller that
they are ready. If the caller has dropped them by then, the thread needs the GIL; while Python up
to 3.13 finalizes the interpreter, that ends the thread in a way which aborts the process:
"terminate called without an active exception".
"""

import atexit
import functools
import os
import time
from contextlib import suppress

from instep.process import procfs

_NAME = "pt_gloo_runloop"
_SECONDS = 1.0


@functools.cache
def wait_at_exit() -> None:
    """At exit, let Gloo's threads release what they hold; one that waits for a peer is left."""
    atexit.register(_wait)


def _wait() -> None:
    threads = procfs.threads(_NAME)
    deadline = time.monotonic() + _SECONDS
    running = bool(threads)
    while running and time.monotonic() < deadline:
        time.sleep(0.001)  # releases the GIL: whoever waits for it is running now, or done
        running = any(map(_is_running, threads))


def _is_running(thread: int) -> bool:
    with suppress(OSError):
        return procfs.read_stat(f"{os.getpid()}/task/{thread}").state == "R"
    return False
