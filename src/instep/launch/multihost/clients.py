"""Whoever calls at the door where the members of a job meet: a member, or anybody else.

All callers are heard at once, each for a while and up to a length; who does not say a line of this
job by then is hung up on.
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

PATIENCE = 5.0
"""Seconds within which who has connected says its line."""
_MOMENT = 0.2
"""Seconds that the first member listens until it looks at the time."""
_AT_ONCE = 64
"""Callers that are heard; one more, and the one that came first is hung up on."""
_LONGEST = 1 << 20
"""Bytes of a line."""
REFUSED = {"refused": True}
"""The answer to a line without the right mark."""


@dataclass(frozen=True)
class JoinRequest:
    """A line of this job, and the connection over which it came."""

    line: socket.socket
    message: dict[str, Any]


@dataclass(eq=False)
class _Client:
    line: socket.socket
    drawn: str
    """The number that it was told."""
    end: float
    begun: bytearray = field(default_factory=bytearray)


class ClientListener:
    """Those who come to a socket that listens."""

    def __init__(self, listener: socket.socket, secret: bytes | None) -> None:
        """With a `secret`, only lines that bear its mark are believed."""
        self._listen, self._secret = listener, secret
        self._clients: list[_Client] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def next_request(self) -> JoinRequest | None:
        """The first that has said its line, within a moment."""
        end = monotonic() + _MOMENT
        while (left := end - monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._accept()
                elif (found := self._receive(key.data)) is not None:
                    return found
            while self._clients and self._clients[0].end < monotonic():
                self._close(self._clients[0])
        return None

    def close(self) -> None:
        """Hang up on all who have not said theirs."""
        while self._clients:
            self._close(self._clients[0])
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone again, or there are too many
            line = self._listen.accept()[0]
            line.setblocking(False)
            client = _Client(line, make_secret().hex(), monotonic() + PATIENCE)
            self._clients.append(client)
            if len(self._clients) > _AT_ONCE:
                self._close(self._clients[0])
            self._selector.register(line, selectors.EVENT_READ, client)
            line.send(encode_message({"drawn": client.drawn}, None, ""))

    def _receive(self, client: _Client) -> JoinRequest | None:
        if client not in self._clients:
            return None  # hung up on a moment ago
        try:
            data = client.line.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        client.begun += data
        text, ended, _ = client.begun.partition(b"\n")
        if not ended and data and len(client.begun) <= _LONGEST:
            return None
        try:
            message = decode_message(bytes(text), self._secret, client.drawn) if ended else None
        except AuthenticationError:
            message = None
            with suppress(OSError):
                client.line.send(encode_message(REFUSED, None, ""))
        except ValueError:
            message = None
        if message is None:
            self._close(client)
            return None
        self._forget(client)
        return JoinRequest(client.line, message)

    def _close(self, client: _Client) -> None:
        self._forget(client)
        client.line.close()

    def _forget(self, client: _Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.line)


def encode_message(what: dict[str, Any], secret: bytes | None, about: str) -> bytes:
    """A line of text: JSON, and with a `secret` its mark, for what it answers."""
    text = json.dumps(what).encode()
    if secret is not None:
        text = sign(secret, text, about).hex().encode()
    return text + b"\n"


def decode_message(line: bytes, secret: bytes | None, about: str) -> dict[str, Any]:
    """What a line says. Raises AuthenticationError for one without the right mark, ValueError
    for no line."""
    if secret is None and not line.startswith(b"{"):
        raise AuthenticationError.secret_missing()
    if secret is not None and line.startswith(b"{"):
        raise AuthenticationError.not_of_this_job("what the members of the job say")
    try:
        text = line if secret is None else verify(secret, bytes.fromhex(line.decode()), about)
        message = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def read(
    line: socket.socket, end: float, longest: int, secret: bytes | None, about: str
) -> dict[str, Any]:
    """What the other end says in one line, and not a byte more. Raises OSError when nothing comes
    until `end`, or too much, and as `understood`."""
    text = bytearray()
    while not text.endswith(b"\n"):
        line.settimeout(max(end - monotonic(), 0.001))
        byte = line.recv(1)
        if not byte or len(text) > longest:
            raise ConnectionResetError
        text += byte
    return decode_message(bytes(text[:-1]), secret, about)
