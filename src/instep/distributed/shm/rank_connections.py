"""TCP connections between ranks of different hosts. The calling thread sends and receives.

Gloo passes each message through a thread of its own, which takes longer than a short message.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed import Store

from instep.distributed import interfaces
from instep.distributed.errors import CollectiveTimeoutError, DisagreementError, PeerLeftError
from instep.distributed.shm.memory.signals import CollectiveSignature

LONGEST_MESSAGE = 64 << 10
"""Bytes. The sender's buffer has room for two, so that it never waits for the receiver."""
_GREETING = struct.Struct("!16sI")
"""The token of the member that is called, and the caller."""
_GREETING_SECONDS = 5.0
_HEADER = struct.Struct("!QII")
"""Number and tag of the collective, bytes that follow."""


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective, as this rank understands it."""

    number: int
    """How many there were on these connections before it."""
    signature: CollectiveSignature
    seconds: float
    """How long to wait for another rank."""
    describe: Callable[[], str]
    """The call with the script's line."""

    def header(self, length: int) -> bytes:
        """What precedes a message of `length` bytes."""
        return _HEADER.pack(self.number, self.signature.tag, length)


class RankConnection:
    """This rank's connection to another one."""

    def __init__(self, connected: socket.socket, own: int, other: int) -> None:
        """`own` and `other` are the ranks in the job."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST_MESSAGE)
        self._socket, self._own, self._other = connected, own, other
        weakref.finalize(self, connected.close).atexit = False
        _connections.add(self)

    def send(self, message: bytes, call: CollectiveCall) -> None:
        """Raises PeerLeftError or CollectiveTimeoutError."""
        self._socket.settimeout(call.seconds)
        try:
            self._socket.sendall(call.header(len(message)) + message)
        except OSError as error:
            raise self._lost(call, error) from None

    def receive(self, length: int, call: CollectiveCall) -> memoryview:
        """The `length` bytes that the other rank sends in this call.

        Raises PeerLeftError, CollectiveTimeoutError or DisagreementError.
        """
        header = call.header(length)
        message = memoryview(bytearray(len(header) + length))
        self._socket.settimeout(call.seconds)
        filled = 0
        while filled < len(message):
            try:
                received = self._socket.recv_into(message[filled:])
            except OSError as error:
                raise self._lost(call, error) from None
            if received == 0:
                raise self._lost(call)
            filled += received
            if filled >= len(header) and message[: len(header)] != header:
                sides = {call.describe() or call.signature.text: [self._own]}
                raise DisagreementError.of_collectives(sides | {"another one": [self._other]})
        return message[len(header) :]

    def close(self) -> None:
        """The other rank gets an error if it waits for this one."""
        self._socket.close()

    def _lost(
        self, call: CollectiveCall, error: OSError | None = None
    ) -> PeerLeftError | CollectiveTimeoutError:
        peer, text = f"rank {self._other}", call.signature.text
        if isinstance(error, TimeoutError):
            return CollectiveTimeoutError([peer], text, call.seconds)
        return PeerLeftError(peer, text, self._other)


def connect(
    store: Store,
    own: int,
    members: Sequence[int],
    called: Sequence[int],
    callers: Sequence[int],
    seconds: float,
) -> tuple[dict[int, RankConnection], dict[int, RankConnection]]:
    """The connections of the member `own` to the members `called`, and of `callers` to it.

    Collective; `members` are ranks of the job. Each reads from the store where the others listen,
    and their tokens: who does not know a member's token is disconnected.
    """
    address, token = interfaces.address_of_gloo(), secrets.token_bytes(16)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN) as listener:
        listener.settimeout(seconds)
        port = listener.getsockname()[1]
        store.set(f"listener/{own}", json.dumps([address, port, token.hex()]))
        to = {other: _call(store, other, own, seconds) for other in called}
        accepted = _accept(listener, token, callers)

    def between(sockets: dict[int, socket.socket]) -> dict[int, RankConnection]:
        return {
            other: RankConnection(s, members[own], members[other]) for other, s in sockets.items()
        }

    return between(to), between(accepted)


def _call(store: Store, member: int, caller: int, seconds: float) -> socket.socket:
    """A connection to `member`."""
    address, port, token = json.loads(store.get(f"listener/{member}"))
    connection = socket.create_connection((address, port), seconds)
    connection.sendall(_GREETING.pack(bytes.fromhex(token), caller))
    return connection


def _accept(
    listener: socket.socket, token: bytes, callers: Sequence[int]
) -> dict[int, socket.socket]:
    accepted: dict[int, socket.socket] = {}
    while len(accepted) < len(callers):
        connection = listener.accept()[0]
        caller = _read_greeting(connection, token)
        if caller is None or caller not in callers or caller in accepted:
            connection.close()
        else:
            accepted[caller] = connection
    return accepted


def _read_greeting(connection: socket.socket, token: bytes) -> int | None:
    """The caller, or None for a stranger."""
    connection.settimeout(_GREETING_SECONDS)
    greeting = b""
    while len(greeting) < _GREETING.size:
        try:
            received = connection.recv(_GREETING.size - len(greeting))
        except OSError:
            return None
        if not received:
            return None
        greeting += received
    told, caller = _GREETING.unpack(greeting)
    return caller if hmac.compare_digest(told, token) else None


_connections: weakref.WeakSet[RankConnection] = weakref.WeakSet()


def _close_after_fork() -> None:
    """A child is no member. Its copies would keep the connections of an ended rank open."""
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_after_fork)
