"""A connection between two processes: messages with a type and fields, one JSON object per line."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

Message = dict[str, Any]
"""The fields of a message; its type is under "type"."""
MAX_BYTES = 1 << 20
"""Of one message."""

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A host that does not answer for 30 seconds is lost."""


class Connection:
    """This process's end of it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._incomplete = b""
        """The beginning of a message whose end has not arrived."""

    def fileno(self) -> int:
        """Readable when there are messages, or when the peer has closed its end."""
        return self._socket.fileno()

    def send(self, message_type: str, **fields: object) -> None:
        """Send a message; it is lost if the peer has closed its end."""
        self.send_line(encode(message_type, **fields))

    def send_line(self, line: bytes) -> None:
        """Send an encoded message."""
        with suppress(OSError):
            self._socket.sendall(line)

    def recv(self) -> list[Message] | None:
        """Wait, and return the messages that arrived, in order.

        None when the peer has closed its end, or sends anything but messages: then this end should
        be closed, too. Raises OSError where the peer's host does not answer.
        """
        try:
            data = self._socket.recv(65536)
        except ConnectionResetError:
            return None
        if not data:
            return None
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        if len(self._incomplete) > MAX_BYTES:
            return None
        try:
            return [_parse(line) for line in lines]
        except (ValueError, RecursionError):
            return None

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def encode(message_type: str, **fields: object) -> bytes:
    """A message for `Connection.send_line`; one that goes to many is encoded once."""
    return json.dumps({"type": message_type, **fields}).encode() + b"\n"


def _parse(line: bytes) -> Message:
    """Raises ValueError or RecursionError for anything but a message."""
    message = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("no type")
    return message


def connect(hosts: Sequence[str], port: int) -> socket.socket | None:
    """A connection to the first of these hosts that can be reached; None if none can."""
    for host in hosts:
        with suppress(OSError):
            sock = socket.create_connection((host, port), timeout=5)
            sock.settimeout(None)
            _detect_lost_host(sock)
            return sock
    return None


def accept(listener: socket.socket) -> socket.socket:
    """The next connection to `listener`. Raises OSError if its peer has closed its end again."""
    sock = listener.accept()[0]
    _detect_lost_host(sock)
    return sock


def _detect_lost_host(sock: socket.socket) -> None:
    """Let a connection end if its peer is another host that is lost."""
    if not ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
