"""The two ends of a line between a rank and the coordinator: Python values over a socket.

The coordinator's end never waits: what the socket does not take yet is kept, so a rank that does
not read (its thread executes a collective) keeps the coordinator from nobody else. A rank's end may
wait for room, in a thread that the one that reads does not wait for.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("!I")
_MOST_AT_ONCE = 1 << 16  # bytes


class RankChannel:
    """Where a rank speaks, from any thread, and listens, in one thread."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._heard = connected.makefile("rb")
        self._speaking = threading.Lock()

    def send(self, value: object) -> None:
        """Returns when it is on its way. Raises OSError where the coordinator has ended."""
        with self._speaking:
            self._socket.sendall(_frame(value))

    def receive(self) -> Any:
        """Wait for the next value. Raises EOFError or OSError where the coordinator has ended."""
        length = self._heard.read(_LENGTH.size)
        if len(length) < _LENGTH.size:
            raise EOFError
        return pickle.loads(self._heard.read(*_LENGTH.unpack(length)))

    def hang_up(self) -> None:
        """Say no more. The coordinator hears that."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give the socket back."""
        self._heard.close()
        self._socket.close()


class CoordinatorChannel:
    """Where the coordinator speaks and listens to one rank, without ever waiting for it."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._heard = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """What to select."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether to call `flush` as soon as there is room."""
        return bool(self._unsent)

    def send(self, value: object) -> None:
        """Send what there is room for, and keep the rest."""
        self._unsent += _frame(value)
        self.flush()

    def flush(self) -> None:
        """Send what there is room for now."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the rank has ended, and `receive` will say so
            self._unsent.clear()

    def receive(self) -> list[Any]:
        """What has come, maybe nothing whole. Raises EOFError or OSError where the rank has ended.

        To be called when there is something to read.
        """
        more = self._socket.recv(_MOST_AT_ONCE)
        if not more:
            raise EOFError
        self._heard += more
        values = []
        while (value := self._next()) is not None:
            values.append(pickle.loads(value))
        return values

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def _next(self) -> bytes | None:
        """The first frame's content, if all of it has come."""
        if len(self._heard) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._heard)[0]
        if len(self._heard) < end:
            return None
        content = bytes(self._heard[_LENGTH.size : end])
        del self._heard[:end]
        return content


def _frame(value: object) -> bytes:
    content = pickle.dumps(value)
    return _LENGTH.pack(len(content)) + content
