"""The first process of a run whose files are put back.

`python -m instep.verify.files.first_process SOCKET command…` runs the command behind the filter of
`file_calls`, whose descriptor it sends through the socket with this number. It ends when the
command has ended and all that this has left, or ORPHAN_SECONDS seconds after the command.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from instep.verify.files.file_calls import install_filter

ORPHAN_SECONDS = 5.0
_PAUSE = 0.01


def main(number: str, *command: str) -> int:
    """Run `command` and return its exit code; that of a shell, if a signal has ended it."""
    with socket.socket(fileno=int(number)) as verify:
        try:
            listener = install_filter()
        except OSError as error:
            verify.sendall(str(error).encode())
            return 1
        socket.send_fds(verify, [b"\0"], [listener])
        os.close(listener)
    process = subprocess.Popen(command)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    for number_ in (signal.SIGINT, signal.SIGHUP):  # the terminal sends them to the command too
        signal.signal(number_, lambda *_: None)
    code = process.wait()
    _wait_for_orphans(time.monotonic() + ORPHAN_SECONDS)
    return code if code >= 0 else 128 - code


def _wait_for_orphans(until: float) -> None:
    """Wait for what the command has started and not waited for."""
    while time.monotonic() < until:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            time.sleep(_PAUSE)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
