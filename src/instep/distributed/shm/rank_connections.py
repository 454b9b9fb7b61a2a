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
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

from torch.distributed import Store

from instep.distributed import interfaces
from instep.distributed.errors import (
    BrokenGroupError,
    CollectiveTimeoutError,
    DisagreementError,
    PeerGaveUpError,
    PeerLeftError,
    RendezvousError,
)
from instep.distributed.shm.memory.signals import CollectiveSignature

LONGEST_MESSAGE = 64 << 10
"""Bytes. The sender's buffer has room for two, so that it never waits for the receiver."""
_GREETING = struct.Struct("!16sI")
"""The token of the member that is called, and the caller."""
_GREETING_SECONDS = 5.0
_HEADER = struct.Struct("!QII")
"""Number and tag of the collective, bytes that follow."""
_GAVE_UP = (1 << 64) - 1
"""In place of the number: this rank has stopped, and the text that follows says why."""
_LONGEST_REASON = 4096
REASON_SECONDS = 1.0
"""How much longer than for a rank of its own host a rank waits for another one: that one may have
waited in vain itself, and then says for whom."""


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


@dataclass(frozen=True)
class _RankAddress:
    """A rank, and where it listens for the others."""

    rank: int
    """In the job."""
    hostname: str
    address: str
    port: int
    token: str
    """In hexadecimal digits."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.hostname}"


class RankConnection:
    """This rank's connection to another one."""

    def __init__(self, connected: socket.socket, own: int, other: _RankAddress) -> None:
        """`own` is this rank in the job."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST_MESSAGE)
        self._socket, self._own, self._other = connected, own, other
        self._is_sending = False
        weakref.finalize(self, connected.close).atexit = False
        _connections.add(self)

    def send(self, message: bytes, call: CollectiveCall) -> None:
        """Raises PeerLeftError or CollectiveTimeoutError."""
        self._socket.settimeout(call.seconds)
        self._is_sending = True
        try:
            self._socket.sendall(call.header(len(message)) + message)
        except OSError as error:
            lost = self._lost(call, error)
        else:
            self._is_sending = False
            return
        raise lost  # here: what is no longer handled did not lead to it

    def receive(self, length: int, call: CollectiveCall) -> memoryview:
        """The `length` bytes that the other rank sends in this call.

        Raises PeerLeftError, PeerGaveUpError, CollectiveTimeoutError or DisagreementError.
        """
        header = call.header(length)
        message = memoryview(bytearray(len(header) + length))
        self._socket.settimeout(call.seconds + REASON_SECONDS)
        filled = 0
        while filled < len(message):
            filled += self._receive_into(message[filled:], call)
            if filled >= len(header) and message[: len(header)] != header:
                raise self._unexpected(message[:filled], call)
        return message[len(header) :]

    def abort(self, why: str) -> None:
        """The other rank gets an error that says why if it waits for this one."""
        reason = why.encode()[:_LONGEST_REASON]
        with suppress(OSError), self._socket:
            if not self._is_sending:
                self._socket.setblocking(False)
                self._socket.sendall(_HEADER.pack(_GAVE_UP, 0, len(reason)) + reason)

    def close(self) -> None:
        """The other rank gets an error if it waits for this one."""
        self._socket.close()

    def _receive_into(self, buffer: memoryview, call: CollectiveCall) -> int:
        """How many bytes there were, one or more."""
        try:
            received = self._socket.recv_into(buffer)
        except OSError as error:
            lost = self._lost(call, error)
        else:
            if received:
                return received
            lost = self._lost(call)
        raise lost

    def _unexpected(self, received: memoryview, call: CollectiveCall) -> Exception:
        """The error for a message that begins with another header than that of the call."""
        number, _, length = _HEADER.unpack_from(received)
        if number != _GAVE_UP:
            sides = {call.describe() or call.signature.text: [self._own]}
            return DisagreementError.of_collectives(sides | {"another one": [self._other.rank]})
        reason, length = bytearray(received[_HEADER.size :]), min(length, _LONGEST_REASON)
        while len(reason) < length:
            buffer = memoryview(bytearray(length - len(reason)))
            reason += buffer[: self._receive_into(buffer, call)]
        why = reason.decode(errors="replace")
        return PeerGaveUpError(str(self._other), call.signature.text, why)

    def _lost(self, call: CollectiveCall, error: OSError | None = None) -> BrokenGroupError:
        peer, text = str(self._other), call.signature.text
        if isinstance(error, TimeoutError):
            return CollectiveTimeoutError([peer], text, call.seconds, is_alive=False)
        return PeerLeftError(peer, text, self._other.rank, call.describe())


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
    and their tokens: who does not know a member's token is disconnected. Raises RendezvousError.
    """
    address, token = interfaces.address_of_gloo(), secrets.token_bytes(16)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as opened:
        listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        opened.enter_context(listener)
        port = listener.getsockname()[1]
        me = _RankAddress(members[own], socket.gethostname(), address, port, token.hex())
        store.set(f"listener/{own}", json.dumps(asdict(me)))
        others = {
            other: _RankAddress(**json.loads(store.get(f"listener/{other}")))
            for other in {*called, *callers}
        }
        to = {
            other: opened.enter_context(_call(me, others[other], own, seconds)) for other in called
        }
        expected = {other: others[other] for other in callers}
        accepted = {
            other: opened.enter_context(connection)
            for other, connection in _accept(listener, me, expected, seconds)
        }
        opened.pop_all()
        listener.close()

    def between(sockets: dict[int, socket.socket]) -> dict[int, RankConnection]:
        return {other: RankConnection(s, me.rank, others[other]) for other, s in sockets.items()}

    return between(to), between(accepted)


def _call(me: _RankAddress, other: _RankAddress, own: int, seconds: float) -> socket.socket:
    """A connection to another member, which gets to know that it is from the member `own`."""
    try:
        connection = socket.create_connection((other.address, other.port), seconds)
        connection.sendall(_GREETING.pack(bytes.fromhex(other.token), own))
    except OSError as error:
        is_late = isinstance(error, TimeoutError)
        why = f"no answer within {seconds:g} s" if is_late else error.strerror or error
        raise RendezvousError.not_connected(
            f"{me} cannot connect to {other} at {other.address} port {other.port} ({why})"
        ) from None
    return connection


def _accept(
    listener: socket.socket, me: _RankAddress, callers: dict[int, _RankAddress], seconds: float
) -> Iterator[tuple[int, socket.socket]]:
    missing, token = {*callers}, bytes.fromhex(me.token)
    until = time.monotonic() + seconds
    while missing:
        listener.settimeout(max(0.001, until - time.monotonic()))
        try:
            connection = listener.accept()[0]
        except TimeoutError:
            absent = ", ".join(str(callers[caller]) for caller in sorted(missing))
            raise RendezvousError.not_connected(
                f"{absent} did not connect to {me} at {me.address} port {me.port} within "
                f"{seconds:g} s"
            ) from None
        caller = _read_greeting(connection, token)
        if caller is None or caller not in missing:
            connection.close()
        else:
            missing.remove(caller)
            yield caller, connection


def _read_greeting(connection: socket.socket, token: bytes) -> int | None:
    """The caller, or None for a stranger."""
    until = time.monotonic() + _GREETING_SECONDS
    greeting = b""
    while len(greeting) < _GREETING.size:
        connection.settimeout(max(0.001, until - time.monotonic()))
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
