"""Connections of the other ranks to rank 0, and of no other process.

Both ends prove to each other that they know the job's key before anything is unpickled. A process
that does not, or takes too long, is disconnected, and delays no rank.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_SECONDS = 5
"""How long a client may take for each of its messages."""
_MAX_STRANGERS = 64
"""Clients that are being authenticated beside the ranks that are to come; one more, and the oldest
is disconnected."""


def accept_ranks(listener: socket.socket, size: int, key: bytes) -> list[socket.socket]:
    """The connections of ranks 1 to `size` - 1, in this order; waits for all."""
    accepted: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
    threading.Thread(target=_accept, args=(listener, key, size, accepted), daemon=True).start()
    connected: dict[int, socket.socket] = {}
    while len(connected) < size - 1:
        rank, client = accepted.get()
        if rank in connected or not 0 < rank < size:
            client.close()
        else:
            connected[rank] = client
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
    return [connected[rank] for rank in range(1, size)]


def connect_to_rank_0(host: str, port: int, rank: int, key: bytes) -> socket.socket:
    """This rank's connection. Raises multiprocessing's AuthenticationError for another process."""
    connection = Connection(socket.create_connection((host, port)).detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(str(rank).encode())
    return _without_delay(connection)


def _accept(
    listener: socket.socket,
    key: bytes,
    size: int,
    accepted: queue.SimpleQueue[tuple[int, socket.socket]],
) -> None:
    pending: deque[socket.socket] = deque()
    with suppress(OSError):  # the listener is shut down
        while True:
            client = listener.accept()[0]
            pending.append(client)
            if len(pending) > _MAX_STRANGERS + size:
                with suppress(OSError):
                    pending.popleft().shutdown(socket.SHUT_RDWR)  # which ends its thread
            arguments = (client, key, pending, accepted)
            threading.Thread(target=_authenticate, args=arguments, daemon=True).start()


def _authenticate(
    client: socket.socket,
    key: bytes,
    pending: deque[socket.socket],
    accepted: queue.SimpleQueue[tuple[int, socket.socket]],
) -> None:
    _set_read_timeout(client, _SECONDS)
    connection = Connection(os.dup(client.fileno()))
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        rank = int(connection.recv_bytes(16))
    except (AuthenticationError, EOFError, OSError, ValueError, AssertionError):  # not a rank
        connection.close()
    else:
        known = _without_delay(connection)
        _set_read_timeout(known, 0)
        accepted.put((rank, known))
    finally:
        with suppress(ValueError):  # it was disconnected
            pending.remove(client)
        client.close()


def _set_read_timeout(client: socket.socket, seconds: int) -> None:
    """0: reading waits as long as it takes."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _without_delay(connection: Connection) -> socket.socket:
    """Its socket. Each message goes at once (Nagle's algorithm would keep the second for 40 ms)."""
    same = socket.socket(fileno=os.dup(connection.fileno()))
    connection.close()
    same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return same
