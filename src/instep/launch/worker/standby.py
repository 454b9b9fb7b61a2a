"""The entry point of a standby process, which imports PyTorch before there is a rank to run.

`python -P -m instep.launch.worker.standby FD IMPORTED`, where FD is a socket to the supervisor, and
IMPORTED a pipe that is closed after the imports. A message through the socket makes it a rank.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module

from instep.distributed.identity.launchers import STORE_FD
from instep.launch.worker import entry, torch_import, torch_init
from instep.process import procfs

_IMPORTS = ("torch", "torch.distributed", "torch.utils.data")


def main(line: str, imported: str) -> None:
    """Import PyTorch, wait until a rank is needed, and be that rank."""
    connection = socket.socket(fileno=int(line))
    waiting = threading.Thread(target=_wait_for_message, args=(connection,), daemon=True)
    waiting.start()
    torch_import.prepare()
    torch_init.install_patches()  # before other modules of torch import what they replace
    for name in _IMPORTS:
        with suppress(Exception):  # of a library's import, which the script's own will show
            import_module(name)
    os.close(int(imported))
    waiting.join()
    entry.main(*_receive_rank(connection))


def _wait_for_message(connection: socket.socket) -> None:
    """Wait until the supervisor sends something; end this process if there is no supervisor."""
    select.select([connection], [], [])
    if not connection.recv(1, socket.MSG_PEEK):
        os._exit(0)


def _receive_rank(connection: socket.socket) -> list[str]:
    """Take over a rank's streams and environment, and return the arguments of its entry point."""
    length, descriptors, _, _ = socket.recv_fds(connection, 8, 4)
    message = bytearray()
    while len(message) < int.from_bytes(length):
        message += connection.recv(int.from_bytes(length) - len(message)) or os._exit(0)
    environ, arguments = json.loads(message)
    for stream, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    if STORE_FD in environ:
        environ[STORE_FD] = str(descriptors[3])
    procfs.replace_environ(environ)
    return [str(connection.detach()), *arguments]


if __name__ == "__main__":
    main(*sys.argv[1:])
