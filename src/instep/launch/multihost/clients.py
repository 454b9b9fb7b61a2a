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
from instep.distributed.identity.authentication import marked, new_secret, verified

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
class Call:
    """A line of this job, and the connection over which it came."""

    line: socket.socket
    told: dict[str, Any]


@dataclass(eq=False)
class _Caller:
    line: socket.socket
    drawn: str
    """The number that it was told."""
    end: float
    begun: bytearray = field(default_factory=bytearray)


class Callers:
    """Those who come to a socket that listens."""

    def __init__(self, door: socket.socket, secret: bytes | None) -> None:
        """With a `secret`, only lines that bear its mark are believed."""
        self._door, self._secret = door, secret
        self._callers: list[_Caller] = []
        self._selector = selectors.DefaultSelector()
        door.setblocking(False)
        self._selector.register(door, selectors.EVENT_READ)

    def next(self) -> Call | None:
        """The first that has said its line, within a moment."""
        end = monotonic() + _MOMENT
        while (left := end - monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._answer()
                elif (found := self._hear(key.data)) is not None:
                    return found
            while self._callers and self._callers[0].end < monotonic():
                self._hang_up(self._callers[0])
        return None

    def close(self) -> None:
        """Hang up on all who have not said theirs."""
        while self._callers:
            self._hang_up(self._callers[0])
        self._selector.close()

    def _answer(self) -> None:
        with suppress(OSError):  # it has gone again, or there are too many
            line = self._door.accept()[0]
            line.setblocking(False)
            caller = _Caller(line, new_secret().hex(), monotonic() + PATIENCE)
            self._callers.append(caller)
            if len(self._callers) > _AT_ONCE:
                self._hang_up(self._callers[0])
            self._selector.register(line, selectors.EVENT_READ, caller)
            line.send(said({"drawn": caller.drawn}, None, ""))

    def _hear(self, caller: _Caller) -> Call | None:
        if caller not in self._callers:
            return None  # hung up on a moment ago
        try:
            data = caller.line.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        caller.begun += data
        text, ended, _ = caller.begun.partition(b"\n")
        if not ended and data and len(caller.begun) <= _LONGEST:
            return None
        try:
            told = understood(bytes(text), self._secret, caller.drawn) if ended else None
        except AuthenticationError:
            told = None
            with suppress(OSError):
                caller.line.send(said(REFUSED, None, ""))
        except ValueError:
            told = None
        if told is None:
            self._hang_up(caller)
            return None
        self._forget(caller)
        return Call(caller.line, told)

    def _hang_up(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.line.close()

    def _forget(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.line)


def said(what: dict[str, Any], secret: bytes | None, about: str) -> bytes:
    """A line of text: JSON, and with a `secret` its mark, for what it answers."""
    text = json.dumps(what).encode()
    if secret is not None:
        text = marked(secret, text, about).hex().encode()
    return text + b"\n"


def understood(line: bytes, secret: bytes | None, about: str) -> dict[str, Any]:
    """What a line says. Raises AuthenticationError for one without the right mark, ValueError
    for no line."""
    if secret is None and not line.startswith(b"{"):
        raise AuthenticationError.secret_missing()
    if secret is not None and line.startswith(b"{"):
        raise AuthenticationError.not_of_this_job("what the members of the job say")
    try:
        text = line if secret is None else verified(secret, bytes.fromhex(line.decode()), about)
        told = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(told, dict):
        raise ValueError("no object")
    return told


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
    return understood(bytes(text[:-1]), secret, about)
