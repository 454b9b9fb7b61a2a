"""The connection of a rank's watcher to that of rank 0."""

from __future__ import annotations

import socket

import pytest

from instep.distributed.watchdog import call_stack
from instep.distributed.watchdog.connection import KEEPALIVE, connect


def own_address():
    """An address of this host that other hosts would use; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


def kept_alive(address):
    with socket.create_server((address, 0)) as server:
        sock = connect([address], server.getsockname()[1])
        with sock:
            seconds = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)), seconds


def test_a_lost_host_is_noticed_whatever_the_launcher_says_of_hosts():
    """RANK and WORLD_SIZE alone do not say on how many hosts the ranks are."""
    if (address := own_address()) is None:
        pytest.skip("this host has no address but loopback")
    assert kept_alive(address) == (True, KEEPALIVE["TCP_KEEPIDLE"])


def test_within_a_host_nothing_is_probed():
    assert not kept_alive("127.0.0.1")[0]


def test_a_wait_at_exit_is_no_collective_once_the_groups_are_closed() -> None:
    found: list[object] = []
    call_stack.wait_at_exit(lambda: found.append(call_stack.main_thread_wait()))
    assert found == [None]
