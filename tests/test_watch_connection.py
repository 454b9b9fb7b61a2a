"""The connection of a rank's watcher to that of rank 0."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from instep.distributed.watchdog import call_stack
from instep.distributed.watchdog.connection import KEEPALIVE, connect
from instep.distributed.watchdog.event_loop import EventLoop
from instep.distributed.watchdog.hub.hub import Hub


def own_address():
    """An address of this host that other hosts would use; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


def kept_alive(address):
    """Both ends of a connection: a rank's watcher, and the hub."""
    loop, accepted = EventLoop(), []
    with socket.create_server((address, 0)) as server:
        new = Hub(loop, 2, server, "token").new_connections
        new.add = accepted.append
        with connect([address], server.getsockname()[1]) as sock:
            new._accept()
            with accepted[0] as other:
                return [_probes_after(end) for end in (sock, other)]


def _probes_after(sock):
    """Seconds; None where nothing is probed."""
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    return None


def test_a_lost_host_is_noticed_whatever_the_launcher_says_of_hosts():
    """RANK and WORLD_SIZE alone do not say on how many hosts the ranks are."""
    if (address := own_address()) is None:
        pytest.skip("this host has no address but loopback")
    assert kept_alive(address) == [KEEPALIVE["TCP_KEEPIDLE"]] * 2


def test_within_a_host_nothing_is_probed():
    assert kept_alive("127.0.0.1") == [None, None]


def test_a_wait_at_exit_is_no_collective_once_the_groups_are_closed() -> None:
    found: list[object] = []
    call_stack.wait_at_exit(lambda: found.append(call_stack.main_thread_wait()))
    assert found == [None]


def test_the_groups_may_be_closed_while_the_watcher_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # as it was a moment before
    found: list[object] = []
    call_stack.wait_at_exit(lambda: found.append(call_stack.main_thread_wait()))
    assert found == [None]
