"""Whether another process of this host still lives."""

from __future__ import annotations

import os
import select
import socket


def address_of_this_process() -> str:
    """Host, namespace and number of this process: what another one needs to watch it."""
    return f"{_host()} {os.getpid()}"


def _host() -> str:
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


class Watch:
    """A look at one process. One on another host always seems to live."""

    def __init__(self, address: str) -> None:
        host, _, number = address.rpartition(" ")
        self._ended = False
        self._handle: int | None = None
        if host == _host():
            try:
                self._handle = os.pidfd_open(int(number))
            except ProcessLookupError:
                self._ended = True

    def ended(self) -> bool:
        """Whether the process has ended; it may still be a zombie."""
        if self._handle is not None and not self._ended:
            self._ended = bool(select.select([self._handle], [], [], 0)[0])
        return self._ended

    def close(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
