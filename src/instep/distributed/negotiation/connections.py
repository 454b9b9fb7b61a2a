"""How rank 0 lets the other ranks' lines in, and nobody else's.

Both ends prove to each other that they know the job's key before anything is unpickled. Whoever
does not, or takes too long, is hung up on, and keeps nobody else waiting.
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
"""How long a caller may take for each part of what it says."""
_AT_ONCE = 64
"""Callers that are heard; one more, and the one that came first is hung up on."""


def accept_ranks(listener: socket.socket, size: int, key: bytes) -> list[socket.socket]:
    """The connections of ranks 1 to `size` - 1, in this order; waits for all."""
    arrived: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(listener, key, arrived), daemon=True).start()
    lines: dict[int, socket.socket] = {}
    while len(lines) < size - 1:
        rank, line = arrived.get()
        if rank in lines or not 0 < rank < size:
            line.close()
        else:
            lines[rank] = line
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
    return [lines[rank] for rank in range(1, size)]


def connect_to_rank_0(host: str, port: int, rank: int, key: bytes) -> socket.socket:
    """This rank's connection to rank 0. Raises AuthenticationError where it is not rank 0."""
    connection = Connection(socket.create_connection((host, port)).detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(str(rank).encode())
    return _undelayed(connection)


def _answer(
    listener: socket.socket, key: bytes, arrived: queue.SimpleQueue[tuple[int, socket.socket]]
) -> None:
    waiting: deque[socket.socket] = deque()
    with suppress(OSError):  # the listener is shut down
        while True:
            line = listener.accept()[0]
            waiting.append(line)
            if len(waiting) > _AT_ONCE:
                with suppress(OSError):
                    waiting.popleft().shutdown(socket.SHUT_RDWR)  # which ends its thread
            told = (line, key, waiting, arrived)
            threading.Thread(target=_greet, args=told, daemon=True).start()


def _greet(
    line: socket.socket,
    key: bytes,
    waiting: deque[socket.socket],
    arrived: queue.SimpleQueue[tuple[int, socket.socket]],
) -> None:
    _limit(line, _SECONDS)
    connection = Connection(os.dup(line.fileno()))
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        rank = int(connection.recv_bytes(16))
    except (AuthenticationError, EOFError, OSError, ValueError, AssertionError):  # a stranger
        connection.close()
    else:
        known = _undelayed(connection)
        _limit(known, 0)
        arrived.put((rank, known))
    finally:
        with suppress(ValueError):  # it was hung up on
            waiting.remove(line)
        line.close()


def _limit(line: socket.socket, seconds: int) -> None:
    """How long reading from it waits; 0: as long as it takes."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _undelayed(connection: Connection) -> socket.socket:
    """Its socket. Each message goes at once (Nagle's algorithm would keep the second for 40 ms)."""
    same = socket.socket(fileno=os.dup(connection.fileno()))
    connection.close()
    same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return same
