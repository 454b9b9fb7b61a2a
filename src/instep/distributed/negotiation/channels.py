"""Both ends of a socket between a rank and the coordinator, for pickled Python values.

The coordinator's end never waits: it keeps what the socket does not take yet, so a rank that does
not read (its thread executes a collective) does not delay the others. A rank's end may wait until
the socket takes more, in a thread for which the reading thread does not wait.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16


class RankChannel:
    """A rank's end: `send` from any thread, `receive` in one thread."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = connected.makefile("rb")
        self._send_lock = threading.Lock()

    def send(self, value: object) -> None:
        """Send a value. Raises OSError where the coordinator has ended."""
        with self._send_lock:
            self._socket.sendall(encode(value))

    def receive(self) -> Any:
        """Wait for the next value. Raises EOFError or OSError where the coordinator has ended."""
        length = self._received.read(_LENGTH.size)
        if len(length) < _LENGTH.size:
            raise EOFError
        return pickle.loads(self._received.read(*_LENGTH.unpack(length)))

    def shutdown(self) -> None:
        """Send no more; the coordinator's `receive` raises EOFError."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self._received.close()
        self._socket.close()


class CoordinatorChannel:
    """The coordinator's end for one rank."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    @property
    def has_pending(self) -> bool:
        """Whether to call `flush` as soon as the socket takes more."""
        return bool(self._unsent)

    def send(self, encoded: bytes) -> None:
        """Send as much of a value that was encoded as the socket takes, and keep the rest."""
        self._unsent += encoded
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the rank has ended, and `receive` will say so
            self._unsent.clear()

    def receive(self) -> list[Any]:
        """The complete values of one read, maybe none; call it when the socket is readable.

        Raises EOFError or OSError where the rank has ended.
        """
        more = self._socket.recv(_READ_BYTES)
        if not more:
            raise EOFError
        self._received += more
        values = []
        while (value := self._next()) is not None:
            values.append(pickle.loads(value))
        return values

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _next(self) -> bytes | None:
        """The first frame's content, if all of it has arrived."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        content = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return content


def encode(value: object) -> bytes:
    """A value as it is sent; one for many ranks is encoded once."""
    content = pickle.dumps(value)
    return _LENGTH.pack(len(content)) + content
