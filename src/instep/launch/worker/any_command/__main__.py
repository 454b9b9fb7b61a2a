"""`python -m instep.launch.worker.any_command COMMAND args…`: become the command, as a rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from instep.distributed.identity.launchers import STORE_FD


def main(command: Sequence[str]) -> None:
    """Replace this process by the command. Raises OSError if it cannot be executed."""
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    own = os.path.dirname(sys.executable)  # `python` in a shell script is the ranks' Python
    os.environ["PATH"] = os.pathsep.join((own, os.environ.get("PATH", os.defpath)))
    if STORE_FD in os.environ:
        os.set_inheritable(int(os.environ[STORE_FD]), True)
    sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec keeps that
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    main(sys.argv[1:])
