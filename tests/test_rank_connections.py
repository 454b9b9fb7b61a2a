"""Connections between the first ranks of hosts; here two threads are the ranks."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from instep.distributed.shm.memory.signals import signature_of
from instep.distributed.shm.rank_connections import CollectiveCall, connect
from instep.errors import CollectiveTimeoutError, PeerLeftError


class StrangerFirst:
    """A store. Before a rank reads where another one listens, a stranger has connected there."""

    def __init__(self):
        self._store = HashStore()
        self.strangers = []

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key):
        address, port, token = json.loads(self._store.get(key))
        wrong = bytes(len(bytes.fromhex(token)))
        stranger = socket.create_connection((address, port), 30)
        stranger.sendall(wrong + (0).to_bytes(4, "big"))
        self.strangers.append(stranger)
        return json.dumps([address, port, token])


@pytest.fixture
def two_ranks(monkeypatch):
    """A function of a store: the connections to and from rank 7, and those of rank 9."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    opened = []

    def connect_them(store):
        with ThreadPoolExecutor(2) as threads:
            ranks = [
                threads.submit(connect, store, r, [7, 9], [1 - r], [1 - r], 30) for r in (0, 1)
            ]
            connected = [each.result() for each in ranks]
        opened.extend(each for both in connected for side in both for each in side.values())
        return connected

    yield connect_them
    for connection in opened:
        connection.close()


def call(seconds=30.0):
    return CollectiveCall(1, signature_of("all_reduce"), seconds, str)


def test_a_stranger_is_disconnected_and_delays_nobody(two_ranks):
    store = StrangerFirst()
    (to_9, _), (_, from_7) = two_ranks(store)
    to_9[1].send(b"abc", call())
    assert from_7[0].receive(3, call()) == b"abc"
    assert len(store.strangers) == 2
    for stranger in store.strangers:
        stranger.settimeout(30)
        assert stranger.recv(1) == b""
        stranger.close()


def test_who_sends_nothing_is_named(two_ranks):
    _, (_, from_7) = two_ranks(HashStore())
    with pytest.raises(CollectiveTimeoutError, match=r"rank 7 did not come to all_reduce"):
        from_7[0].receive(3, call(0.1))


def test_the_copies_of_a_forked_child_do_not_keep_a_connection_open(two_ranks):
    (to_9, from_9), (_, from_7) = two_ranks(HashStore())
    until, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(until, 1)
        os._exit(0)
    try:
        for connection in (*to_9.values(), *from_9.values()):
            connection.close()
        with pytest.raises(PeerLeftError, match="rank 7 has ended"):
            from_7[0].receive(3, call())
    finally:
        os.close(end)
        os.waitpid(child, 0)
