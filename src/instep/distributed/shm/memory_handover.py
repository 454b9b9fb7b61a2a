"""New memory that all ranks of a host have open, at any time in a job.

Rank 0 makes it and sends its descriptor to the others (SCM_RIGHTS in unix(7)). When a group is made
the others open it in /proc instead; a rank of an unedited script may no longer do that, since it
has denied itself to open files for writing (landlock(7)).

The sockets have names that no other process knows before they are bound, and the kernel tells who
has sent the descriptor.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import ExitStack

import torch

from instep.distributed.errors import SharedMemoryError
from instep.distributed.shm.exchange import Exchange
from instep.distributed.shm.memory.host_memory import open_host_memory
from instep.process.procfs import CREDENTIALS

_DESCRIPTOR = struct.Struct("i")


def open_on_all_ranks(exchange: Exchange, size: int) -> int:
    """The descriptor of `size` bytes of zeros or more. Every rank has it open. Collective.

    Raises SharedMemoryError on all ranks if any of them cannot have it.
    """
    name = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)
    exchange.broadcast(name, 0, None)
    addresses = [b"\0instep-%s-%d" % (bytes(name).hex().encode(), r) for r in range(exchange.size)]
    problem = ""
    with ExitStack() as failed:
        with ExitStack() as open_sockets:
            try:
                if exchange.rank == 0:
                    descriptor = open_host_memory(size)
                    failed.callback(os.close, descriptor)
                endpoint = open_sockets.enter_context(_socket(addresses[exchange.rank]))
            except OSError as error:
                problem = str(error)
            exchange.barrier(None)
            if not problem and exchange.rank == 0:
                problem = _send(endpoint, descriptor, addresses[1:])
            exchange.barrier(None)
            if not problem and exchange.rank != 0:
                try:
                    descriptor = _receive(endpoint, exchange.signals.peers[0].pid)
                    failed.callback(os.close, descriptor)
                except OSError as error:
                    problem = str(error)
        if count := exchange.count_ranks(bool(problem)):
            raise SharedMemoryError(size, count, problem)
        failed.pop_all()
    return descriptor


def _socket(address: bytes) -> socket.socket:
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        endpoint.bind(address)
    except OSError:
        endpoint.close()
        raise
    return endpoint


def _send(endpoint: socket.socket, descriptor: int, addresses: list[bytes]) -> str:
    """Send the descriptor to each address; the problem, or ""."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(descriptor))]
    for address in addresses:
        try:
            endpoint.sendmsg([b"memory"], rights, 0, address)
        except OSError as error:
            return str(error)
    return ""


def _receive(endpoint: socket.socket, sender: int) -> int:
    """The descriptor that the process `sender` has sent. Raises OSError."""
    space = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(_DESCRIPTOR.size)
    try:
        _, entries, _, _ = endpoint.recvmsg(16, space, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise OSError("rank 0 has sent none") from None
    received = {kind: data for _, kind, data in entries}
    descriptor = -1
    if socket.SCM_RIGHTS in received:
        (descriptor,) = _DESCRIPTOR.unpack(received[socket.SCM_RIGHTS])
    if CREDENTIALS.unpack(received[socket.SCM_CREDENTIALS])[:2] != (sender, os.getuid()):
        if descriptor >= 0:
            os.close(descriptor)
        raise PermissionError("another process has sent the memory")
    if descriptor < 0:  # this process may open no more
        raise OSError("the descriptor did not arrive")
    return descriptor
