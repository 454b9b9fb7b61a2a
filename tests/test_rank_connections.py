"""Connections between the first ranks of hosts; here two threads are the ranks."""

import json
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from instep.distributed.shm import rank_connections
from instep.distributed.shm.memory.signals import signature_of
from instep.distributed.shm.rank_connections import CollectiveCall, connect
from instep.errors import (
    CollectiveTimeoutError,
    PeerGaveUpError,
    PeerLeftError,
    RendezvousError,
)
from instep.process.failures.tracebacks import is_caused_by_another_rank
from launching import free_port

HOSTNAME = re.escape(socket.gethostname())


class StrangerFirst:
    """A store. Before a rank reads where another one listens, a stranger has connected there."""

    def __init__(self):
        self._store = HashStore()
        self.strangers = []

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key):
        told = self._store.get(key)
        listener = json.loads(told)
        wrong = bytes(len(bytes.fromhex(listener["token"])))
        stranger = socket.create_connection((listener["address"], listener["port"]), 30)
        stranger.sendall(wrong + (0).to_bytes(4, "big"))
        self.strangers.append(stranger)
        return told


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


def test_who_sends_nothing_is_named(two_ranks, monkeypatch):
    monkeypatch.setattr(rank_connections, "REASON_SECONDS", 0.0)
    _, (_, from_7) = two_ranks(HashStore())
    late = rf"rank 7 on {HOSTNAME} did not come to all_reduce within 0.1 s, or its host cannot"
    with pytest.raises(CollectiveTimeoutError, match=late) as raised:
        from_7[0].receive(3, call(0.1))
    assert is_caused_by_another_rank(raised.value)


def test_a_rank_whose_connection_is_reset_does_not_count_as_the_first_to_fail(two_ranks):
    """It did: the socket's error came before that of the collective."""
    (to_9, _), (_, from_7) = two_ranks(HashStore())
    to_9[1].send(b"abc", call())
    from_7[0].close()  # with bytes that nobody has read
    with pytest.raises(PeerLeftError, match=rf"rank 9 on {HOSTNAME} has ended") as raised:
        to_9[1].send(bytes(32 << 20), call())
    assert is_caused_by_another_rank(raised.value)


def test_who_gives_up_says_why(two_ranks):
    (to_9, _), (_, from_7) = two_ranks(HashStore())
    to_9[1].abort("rank 8 died")
    with pytest.raises(PeerGaveUpError) as raised:
        from_7[0].receive(300_000, call())
    assert re.match(rf"rank 7 on {HOSTNAME} gave up; .* It said: rank 8 died", str(raised.value))


def test_a_reason_is_not_taken_for_the_rest_of_a_message(two_ranks):
    (to_9, _), (_, from_7) = two_ranks(HashStore())
    long = 32 << 20  # more than the buffers of both hold
    with pytest.raises(CollectiveTimeoutError):
        to_9[1].send(bytes(long), call(0.1))
    to_9[1].abort("x" * 4096)
    with pytest.raises(PeerLeftError):
        from_7[0].receive(long, call())


def listener_of(rank, port):
    told = {"rank": rank, "hostname": "there", "address": "127.0.0.1", "port": port}
    return json.dumps(told | {"token": bytes(16).hex()})


def test_a_host_that_refuses_a_connection_is_named_with_its_address(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    port = free_port()
    store.set("listener/1", listener_of(9, port))
    why = rf"rank 7 on {HOSTNAME} cannot connect to rank 9 on there at 127.0.0.1 port {port} "
    with pytest.raises(RendezvousError, match=rf"{why}\(Connection refused\)\. .* any TCP port"):
        connect(store, 0, [7, 9], [1], [1], 30)


def test_a_host_that_does_not_connect_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store.set("listener/1", listener_of(9, silent.getsockname()[1]))
        absent = rf"rank 9 on there did not connect to rank 7 on {HOSTNAME} at 127.0.0.1 port \d+"
        with pytest.raises(RendezvousError, match=rf"{absent} within 0.1 s\. .* any TCP port"):
            connect(store, 0, [7, 9], [1], [1], 0.1)


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
        with pytest.raises(PeerLeftError, match=f"rank 7 on {HOSTNAME} has ended"):
            from_7[0].receive(3, call())
    finally:
        os.close(end)
        os.waitpid(child, 0)
