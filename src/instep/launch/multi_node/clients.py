"""Messages of clients that connect to the rendezvous: participants of the job, or strangers.

All clients are read at once. A connection is closed if its first message is late, too long, or
not signed by this job.
"""

from __future__ import annotations

import json
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from instep.distributed.errors import AuthenticationError
from instep.distributed.identity.authentication import make_secret, sign, verify

MESSAGE_TIMEOUT = 5.0
"""Seconds within which a client must send its message."""
_POLL_INTERVAL = 0.2
"""Seconds of one wait for clients."""
_MAX_STRANGERS = 64
"""Open connections beside those of the participants; with one more, the oldest is closed."""
_MAX_LENGTH = 1 << 20
"""Bytes of a line."""
REFUSED = {"refused": True}
"""The answer to a message without a valid signature."""


@dataclass(frozen=True)
class JoinRequest:
    """A message of this job, and the connection over which it came."""

    connection: socket.socket
    message: dict[str, Any]


@dataclass(eq=False)
class _Client:
    connection: socket.socket
    nonce: str
    """The number that this client was sent; its message is signed together with it."""
    end: float
    partial: bytearray = field(default_factory=bytearray)


class ClientListener:
    """The clients of a listening socket."""

    def __init__(self, listener: socket.socket, secret: bytes | None, expected: int) -> None:
        """`expected` clients will come. With a `secret`, only messages that are signed with it are
        accepted."""
        self._listener, self._secret = listener, secret
        self._most = _MAX_STRANGERS + expected
        self._clients: dict[_Client, None] = {}
        """Those whose message has not come, the oldest first."""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def next_request(self) -> JoinRequest | None:
        """The next valid message; None if none came within a fraction of a second."""
        end = monotonic() + _POLL_INTERVAL
        while (left := end - monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._accept()
                elif (found := self._receive(key.data)) is not None:
                    return found
            while self._clients and self._oldest().end < monotonic():
                self._close(self._oldest())
        return None

    def close(self) -> None:
        """Close the connections of all clients whose message has not come."""
        while self._clients:
            self._close(self._oldest())
        self._selector.close()

    def _oldest(self) -> _Client:
        return next(iter(self._clients))

    def _accept(self) -> None:
        with suppress(OSError):  # the client has gone, or there are too many descriptors
            connection = self._listener.accept()[0]
            connection.setblocking(False)
            client = _Client(connection, make_secret().hex(), monotonic() + MESSAGE_TIMEOUT)
            self._clients[client] = None
            self._selector.register(connection, selectors.EVENT_READ, client)
            if len(self._clients) > self._most:
                self._close(self._oldest())
            connection.send(encode_message({"nonce": client.nonce}, None, ""))

    def _receive(self, client: _Client) -> JoinRequest | None:
        if client not in self._clients:
            return None  # its connection was closed in this turn
        try:
            data = client.connection.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        client.partial += data
        text, ended, _ = client.partial.partition(b"\n")
        if not ended and data and len(client.partial) <= _MAX_LENGTH:
            return None
        try:
            message = decode_message(bytes(text), self._secret, client.nonce) if ended else None
        except AuthenticationError:
            message = None
            with suppress(OSError):
                client.connection.send(encode_message(REFUSED, None, ""))
        except ValueError:
            message = None
        if message is None:
            self._close(client)
            return None
        self._remove(client)
        return JoinRequest(client.connection, message)

    def _close(self, client: _Client) -> None:
        self._remove(client)
        client.connection.close()

    def _remove(self, client: _Client) -> None:
        del self._clients[client]
        self._selector.unregister(client.connection)


def encode_message(message: dict[str, Any], secret: bytes | None, nonce: str) -> bytes:
    """A line of text: JSON, and with a `secret` its mark, for what it answers."""
    text = json.dumps(message).encode()
    if secret is not None:
        text = sign(secret, text, nonce).hex().encode()
    return text + b"\n"


def decode_message(line: bytes, secret: bytes | None, nonce: str) -> dict[str, Any]:
    """What a line says. Raises AuthenticationError for one without the right mark, ValueError
    for no line."""
    if secret is None and not line.startswith(b"{"):
        raise AuthenticationError.secret_missing()
    if secret is not None and line.startswith(b"{"):
        raise AuthenticationError.not_of_this_job("what the members of the job say")
    try:
        text = line if secret is None else verify(secret, bytes.fromhex(line.decode()), nonce)
        message = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def read_message(
    connection: socket.socket, end: float, longest: int, secret: bytes | None, nonce: str
) -> dict[str, Any]:
    """What the other end says in one line, and not a byte more. Raises OSError when nothing comes
    until `end`, or too much, and as `decode_message`."""
    text = bytearray()
    while not text.endswith(b"\n"):
        connection.settimeout(max(end - monotonic(), 0.001))
        byte = connection.recv(1)
        if not byte or len(text) > longest:
            raise ConnectionResetError
        text += byte
    return decode_message(bytes(text[:-1]), secret, nonce)
